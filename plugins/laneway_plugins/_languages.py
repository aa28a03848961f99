"""Languages by their codes: ISO 639-1 and 639-3, with a script or a region behind them.  Pure."""

from __future__ import annotations

import difflib
import re

import attrs

from laneway import InvalidRequestError

# ISO 639-1, ISO 639-3 (a dash where there is no two-letter code), name.
_TABLE = """
aa aar Afar|ab abk Abkhazian|af afr Afrikaans|ak aka Akan|am amh Amharic|an arg Aragonese|ar ara Arabic|as asm Assamese
av ava Avaric|ae ave Avestan|ay aym Aymara|az aze Azerbaijani|ba bak Bashkir|be bel Belarusian|bg bul Bulgarian
bi bis Bislama|bm bam Bambara|bn ben Bengali|bo bod Tibetan|br bre Breton|bs bos Bosnian|ca cat Catalan|ce che Chechen
ch cha Chamorro|co cos Corsican|cr cre Cree|cs ces Czech|cu chu Church Slavonic|cv chv Chuvash|cy cym Welsh
da dan Danish|de deu German|dv div Dhivehi|dz dzo Dzongkha|ee ewe Ewe|el ell Greek|en eng English|eo epo Esperanto
es spa Spanish|et est Estonian|eu eus Basque|fa fas Persian|ff ful Fulah|fi fin Finnish|fj fij Fijian|fo fao Faroese
fr fra French|fy fry Western Frisian|ga gle Irish|gd gla Scottish Gaelic|gl glg Galician|gn grn Guarani|gu guj Gujarati
gv glv Manx|ha hau Hausa|he heb Hebrew|hi hin Hindi|ho hmo Hiri Motu|hr hrv Croatian|ht hat Haitian Creole
hu hun Hungarian|hy hye Armenian|hz her Herero|ia ina Interlingua|id ind Indonesian|ie ile Interlingue|ig ibo Igbo
ii iii Sichuan Yi|ik ipk Inupiaq|io ido Ido|is isl Icelandic|it ita Italian|iu iku Inuktitut|ja jpn Japanese
jv jav Javanese|ka kat Georgian|kg kon Kongo|ki kik Kikuyu|kj kua Kuanyama|kk kaz Kazakh|kl kal Kalaallisut
km khm Khmer|kn kan Kannada|ko kor Korean|kr kau Kanuri|ks kas Kashmiri|ku kur Kurdish|kv kom Komi|kw cor Cornish
ky kir Kyrgyz|la lat Latin|lb ltz Luxembourgish|lg lug Ganda|li lim Limburgish|ln lin Lingala|lo lao Lao
lt lit Lithuanian|lu lub Luba-Katanga|lv lav Latvian|mg mlg Malagasy|mh mah Marshallese|mi mri Maori|mk mkd Macedonian
ml mal Malayalam|mn mon Mongolian|mr mar Marathi|ms msa Malay|mt mlt Maltese|my mya Burmese|na nau Nauru
nb nob Norwegian Bokmål|nd nde North Ndebele|ne nep Nepali|ng ndo Ndonga|nl nld Dutch|nn nno Norwegian Nynorsk
no nor Norwegian|nr nbl South Ndebele|nv nav Navajo|ny nya Nyanja|oc oci Occitan|oj oji Ojibwa|om orm Oromo|or ori Odia
os oss Ossetic|pa pan Punjabi|pi pli Pali|pl pol Polish|ps pus Pashto|pt por Portuguese|qu que Quechua|rm roh Romansh
rn run Rundi|ro ron Romanian|ru rus Russian|rw kin Kinyarwanda|sa san Sanskrit|sc srd Sardinian|sd snd Sindhi
se sme Northern Sami|sg sag Sango|si sin Sinhala|sk slk Slovak|sl slv Slovenian|sm smo Samoan|sn sna Shona|so som Somali
sq sqi Albanian|sr srp Serbian|ss ssw Swati|st sot Southern Sotho|su sun Sundanese|sv swe Swedish|sw swa Swahili
ta tam Tamil|te tel Telugu|tg tgk Tajik|th tha Thai|ti tir Tigrinya|tk tuk Turkmen|tl tgl Tagalog|tn tsn Tswana
to ton Tongan|tr tur Turkish|ts tso Tsonga|tt tat Tatar|tw twi Twi|ty tah Tahitian|ug uig Uyghur|uk ukr Ukrainian
ur urd Urdu|uz uzb Uzbek|ve ven Venda|vi vie Vietnamese|vo vol Volapük|wa wln Walloon|wo wol Wolof|xh xho Xhosa
yi yid Yiddish|yo yor Yoruba|za zha Zhuang|zh zho Chinese|zu zul Zulu|sh hbs Serbo-Croatian
- ace Acehnese|- acm Mesopotamian Arabic|- acq Ta'izzi-Adeni Arabic|- aeb Tunisian Arabic|- ajp South Levantine Arabic
- als Tosk Albanian|- apc Levantine Arabic|- arb Standard Arabic|- ars Najdi Arabic|- ary Moroccan Arabic
- arz Egyptian Arabic|- ast Asturian|- awa Awadhi|- ayr Central Aymara|- azb South Azerbaijani
- azj North Azerbaijani|- ban Balinese|- bcl Central Bikol|- bem Bemba|- bho Bhojpuri|- bjn Banjar|- bug Buginese
- ceb Cebuano|- chr Cherokee|- cjk Chokwe|- ckb Central Kurdish|- cmn Mandarin Chinese|- crh Crimean Tatar
- dik Southwestern Dinka|- din Dinka|- dsb Lower Sorbian|- dyu Dyula|- ekk Standard Estonian|- fil Filipino|- fon Fon
- fur Friulian|- fuv Nigerian Fulfulde|- gaz West Central Oromo|- gom Goan Konkani|- grc Ancient Greek
- gsw Swiss German|- haw Hawaiian|- hil Hiligaynon|- hmn Hmong|- hne Chhattisgarhi|- hsb Upper Sorbian|- ilo Iloko
- kab Kabyle|- kac Kachin|- kam Kamba|- kbp Kabiyè|- kea Kabuverdianu|- khk Halh Mongolian|- kmb Kimbundu
- kmr Northern Kurdish|- knc Central Kanuri|- kok Konkani|- krc Karachay-Balkar|- lij Ligurian|- lmo Lombard
- ltg Latgalian|- lua Luba-Lulua|- luo Luo|- lus Mizo|- lvs Standard Latvian|- mag Magahi|- mai Maithili
- min Minangkabau|- mni Manipuri|- mos Mossi|- nah Nahuatl|- nap Neapolitan|- nds Low German|- npi Nepali
- nso Northern Sotho|- nus Nuer|- ory Odia|- pag Pangasinan|- pap Papiamento|- pbt Southern Pashto
- pcm Nigerian Pidgin|- pes Iranian Persian|- plt Plateau Malagasy|- pms Piedmontese|- prs Dari|- quy Ayacucho Quechua
- rom Romany|- sah Yakut|- sat Santali|- scn Sicilian|- sco Scots|- shn Shan|- swh Swahili|- szl Silesian
- tam Tamil|- taq Tamasheq|- tet Tetum|- tok Toki Pona|- tpi Tok Pisin|- tum Tumbuka|- tyv Tuvan|- tzm Tamazight
- udm Udmurt|- umb Umbundu|- uzn Northern Uzbek|- vec Venetian|- vls West Flemish|- war Waray|- wuu Wu Chinese
- ydd Eastern Yiddish|- yue Cantonese|- zsm Standard Malay
"""

_SCRIPTS = {
    "adlm": "Adlam",
    "arab": "Arabic script",
    "armn": "Armenian script",
    "beng": "Bengali script",
    "cans": "Canadian syllabics",
    "cyrl": "Cyrillic",
    "deva": "Devanagari",
    "ethi": "Ethiopic script",
    "geor": "Georgian script",
    "grek": "Greek script",
    "gujr": "Gujarati script",
    "guru": "Gurmukhi",
    "hang": "Hangul",
    "hans": "Simplified",
    "hant": "Traditional",
    "hebr": "Hebrew script",
    "jpan": "Japanese script",
    "khmr": "Khmer script",
    "knda": "Kannada script",
    "kore": "Korean script",
    "laoo": "Lao script",
    "latn": "Latin script",
    "mlym": "Malayalam script",
    "mong": "Mongolian script",
    "mtei": "Meitei script",
    "mymr": "Myanmar script",
    "olck": "Ol Chiki",
    "orya": "Odia script",
    "sinh": "Sinhala script",
    "taml": "Tamil script",
    "telu": "Telugu script",
    "tfng": "Tifinagh",
    "thai": "Thai script",
    "tibt": "Tibetan script",
}

_REGIONS = {
    "ar": "Argentina",
    "at": "Austria",
    "au": "Australia",
    "be": "Belgium",
    "br": "Brazil",
    "ca": "Canada",
    "ch": "Switzerland",
    "cl": "Chile",
    "cn": "China",
    "co": "Colombia",
    "de": "Germany",
    "eg": "Egypt",
    "es": "Spain",
    "fr": "France",
    "gb": "United Kingdom",
    "hk": "Hong Kong",
    "ie": "Ireland",
    "in": "India",
    "it": "Italy",
    "mo": "Macao",
    "mx": "Mexico",
    "nl": "Netherlands",
    "nz": "New Zealand",
    "pe": "Peru",
    "pt": "Portugal",
    "sg": "Singapore",
    "tw": "Taiwan",
    "uk": "United Kingdom",
    "us": "United States",
    "za": "South Africa",
    "419": "Latin America",
}

_OLD_CODES = {"iw": "he", "in": "id", "ji": "yi", "jw": "jv", "mo": "ro", "cmn": "zh", "ger": "de", "fre": "fr"}
"""Codes that ISO 639 has withdrawn, or that stand for the same written language."""

_CODE = re.compile(r"(?P<base>[a-z]{2,3})(?:[-_](?P<script>[a-z]{4}))?(?:[-_](?P<region>[a-z]{2}|[0-9]{3}))?", re.I)

_UNSPACED_SENTENCES = frozenset({"zh", "ja", "yue", "wuu"})
_UNSPACED_WORDS = _UNSPACED_SENTENCES | {"th", "lo", "km", "my", "bo", "dz", "shn"}


@attrs.frozen
class Language:
    """One language.

    ``code`` is the shortest one that says it: ``de``, ``yue``, ``zh-Hant``, ``pt-BR``; ``base`` is it without script
    and region; ``name`` is in English.
    """

    code: str
    base: str
    name: str

    @property
    def spaced(self) -> bool:
        """Whether spaces stand between its sentences."""
        return self.base not in _UNSPACED_SENTENCES

    @property
    def spaced_words(self) -> bool:
        """Whether spaces stand between its words."""
        return self.base not in _UNSPACED_WORDS


def _read_table() -> tuple[dict[str, str], dict[str, str]]:
    names: dict[str, str] = {}
    shortest: dict[str, str] = {}
    for entry in _TABLE.strip().replace("\n", "|").split("|"):
        two, three, name = entry.split(" ", 2)
        short = three if two == "-" else two
        if three in shortest:
            continue  # a two-letter code goes before
        names[short] = name
        shortest[short] = shortest[three] = short
    for old, new in _OLD_CODES.items():
        shortest.setdefault(old, new)
    return names, shortest


_NAMES, _SHORTEST = _read_table()


def find_language(code: str, field: str) -> Language:
    """The language of a code such as ``de``, ``deu``, ``zh-Hans``, ``srp_Cyrl`` or ``pt-BR``.

    Case and the difference of ``-`` and ``_`` do not matter.  Raises :class:`InvalidRequestError`, ``field`` being
    named in it, for a code that is not known.
    """
    if not isinstance(code, str):
        raise InvalidRequestError(f"a language is a code such as 'de', not {code!r}", field)
    match = _CODE.fullmatch(code)
    base = _SHORTEST.get(match["base"].lower()) if match else None
    if match is None or base is None:
        raise InvalidRequestError(_unknown(code), field)
    script, region = (match["script"] or "").lower(), (match["region"] or "").lower()
    if script and script not in _SCRIPTS:
        raise InvalidRequestError(
            f"the script {match['script']!r} of {code!r} is not known; known: {', '.join(sorted(_SCRIPTS))}", field
        )
    remarks = [text for text in (_SCRIPTS.get(script), _REGIONS.get(region, region.upper())) if text]
    return Language(
        code="-".join(part for part in (base, script.capitalize(), region.upper()) if part),
        base=base,
        name=_NAMES[base] + (f" ({', '.join(remarks)})" if remarks else ""),
    )


def _unknown(code: str) -> str:
    wanted = code.strip().casefold()
    for base, name in _NAMES.items():
        if name.casefold() == wanted:
            return f"a language is given by its code: {base!r} for {name}"
    close = difflib.get_close_matches(code, list(_NAMES.values()), n=1)
    hint = ""
    if close:
        hint = f"; did you mean {next(base for base, name in _NAMES.items() if name == close[0])!r} for {close[0]}?"
    return f"{code!r} is no ISO 639-1 or 639-3 code that is known, such as 'de', 'deu' or 'zh-Hant'{hint}"


def known_languages() -> dict[str, str]:
    """Every language by its shortest code, without scripts and regions."""
    return dict(_NAMES)
