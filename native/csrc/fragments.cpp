// llama.cpp finds user-defined tokens in every text.  The tokenizers of RWKV and PLaMo find control tokens as well, and
// merges may lead to one.  So a text that must not become such a token is cut, and llama.cpp gets the pieces one by one.
#include "fragments.h"

#include "border.h"
#include "deep_stack.h"

#include <algorithm>
#include <queue>

namespace laneway {

namespace {

constexpr std::string_view escaped_space = "\xe2\x96\x81"; // U+2581
constexpr size_t between_looks = 1 << 16;

// Fragments that are remembered, and how many bytes they may have.
constexpr size_t known_most = 4096;
constexpr uint32_t known_bytes = 64;

// Many of llama.cpp's pre-tokenizers match with std::regex.  It calls itself for each character of a match, and a match
// may be as long as the text.  Each call takes 324 bytes of stack here (GCC 12, -O3); frame_bytes is an upper bound for
// compilers that optimise.  Texts below `shallow` fit into the stack of any thread.
constexpr uint32_t shallow = 1024;
constexpr size_t frame_bytes = 2048;
constexpr size_t base_bytes = 1 << 20;

bool continues(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

size_t character_bytes(char first) {
    static constexpr uint8_t lengths[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4};
    return lengths[static_cast<uint8_t>(first) >> 4];
}

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool begins_with(std::string_view text, std::string_view begin) { return text.substr(0, begin.size()) == begin; }

} // namespace

std::string_view Fragments::text_of(int32_t token) const { return llama_vocab_get_text(tokenizing.vocabulary, token); }

bool Fragments::banned(int32_t token) const {
    // These vocabularies write unknown text as a token that looks like a control token.
    const bool has_unknown = tokenizing.type() != LLAMA_VOCAB_TYPE_BPE && tokenizing.type() != LLAMA_VOCAB_TYPE_SPM;
    return !(has_unknown && token == tokenizing.unknown) && tokenizing.specials.guarded(token, rules);
}

void Fragments::add(const char *text, Range range, const Refused *first, const Refused *last,
                    std::vector<int32_t> &tokens) {
    if (tokenizing.type() == LLAMA_VOCAB_TYPE_SPM) {
        merge(text, range, tokens);
        return;
    }
    for (const bool all : {false, true}) {
        if (add_pieces(text, cut(text, range, first, last, all), tokens)) {
            return;
        }
    }
    // Other text than that of a special token became one.  So it is asked for by character, and then spelled by byte.
    for (uint32_t at = range.begin, end; at < range.end; at = end) {
        for (end = at + 1; end < range.end && continues(text[end]);) {
            ++end;
        }
        const Range character{at, end};
        if (!add_pieces(text, {{character, false}}, tokens)) {
            spell(text, character, tokens);
        }
    }
}

// Cuts as few times as can be: the next place is the last character of the first text that no cut is in yet.
std::vector<Fragments::Piece> Fragments::cut(const char *text, Range range, const Refused *first, const Refused *last,
                                             bool all) const {
    std::vector<Piece> pieces;
    uint32_t at = range.begin;
    const auto end_piece = [&](uint32_t end, bool spelled) {
        if (at < end) {
            pieces.push_back({{at, end}, spelled});
            at = end;
        }
    };
    for (const Refused *refused = first; refused != last; ++refused) {
        const uint32_t begin = all ? refused->begin : refused->visible;
        // Not cut yet: the piece that is being made holds it whole.
        if (begin == Refused::none || begin < at) {
            continue;
        }
        uint32_t place = refused->end - 1;
        while (place > begin && continues(text[place])) {
            --place;
        }
        if (place > begin) {
            end_piece(place, false);
        } else { // a single character
            end_piece(begin, false);
            end_piece(refused->end, true);
        }
    }
    end_piece(range.end, false);
    return pieces;
}

// Returns false, and adds nothing, if the pieces make a banned token.
bool Fragments::add_pieces(const char *text, const std::vector<Piece> &pieces, std::vector<int32_t> &tokens) {
    const size_t before = tokens.size();
    if (tokenizing.type() == LLAMA_VOCAB_TYPE_WPM && pieces.size() > 1) {
        // A piece of a word would become a word.  WordPiece's normaliser drops null characters, so they cut without a trace.
        std::string joined;
        for (const Piece &piece : pieces) {
            joined.append(joined.empty() ? 0 : 1, '\0');
            joined.append(text + piece.range.begin, piece.range.end - piece.range.begin);
        }
        return add_pieces(joined.data(), {{{0, static_cast<uint32_t>(joined.size())}, false}}, tokens);
    }
    for (size_t index = 0; index < pieces.size(); ++index) {
        stop.look();
        const Piece &piece = pieces[index];
        if (piece.spelled) {
            spell(text, piece.range, tokens);
            continue;
        }
        std::vector<int32_t> found = ask(text, piece.range);
        if (tokenizing.type() == LLAMA_VOCAB_TYPE_UGM) {
            // A space at the end of the last piece, which a tokenizer that joins spaces leaves to the next word.
            const bool owed = index > 0 && text[piece.range.begin - 1] == ' ' &&
                              (tokens.size() == before || !ends_with(text_of(tokens.back()), escaped_space));
            strip_spaces(text, piece.range, index > 0 && !owed, index + 1 < pieces.size(), found);
        }
        if (std::any_of(found.begin(), found.end(), [&](int32_t token) { return banned(token); })) {
            tokens.resize(before);
            return false;
        }
        tokens.insert(tokens.end(), found.begin(), found.end());
    }
    return true;
}

std::vector<int32_t> Fragments::ask(const char *text, Range range) {
    const uint32_t size = range.end - range.begin;
    const bool small = size <= known_bytes;
    if (small) {
        const auto found = known.find(std::string(text + range.begin, size));
        if (found != known.end()) {
            return found->second;
        }
    }
    std::vector<int32_t> tokens(size + 8);
    int32_t count = 0;
    const auto call = [&] {
        count = llama_tokenize(tokenizing.vocabulary, text + range.begin, static_cast<int32_t>(size), tokens.data(),
                               static_cast<int32_t>(tokens.size()), false, false);
    };
    const auto call_deep = [&] {
        ++asked;
        if (tokenizing.type() == LLAMA_VOCAB_TYPE_BPE && size > shallow) {
            on_deep_stack(base_bytes + size * frame_bytes, call);
        } else {
            call();
        }
    };
    call_deep();
    if (count == INT32_MIN) {
        throw Failure(LANEWAY_BAD_ARGUMENT, "the text has more than 2147483647 tokens");
    }
    if (count < 0) {
        tokens.resize(-count);
        call_deep();
    }
    tokens.resize(count);
    if (small && known.size() < known_most) {
        known.emplace(std::string(text + range.begin, size), tokens);
    }
    return tokens;
}

void Fragments::spell(const char *text, Range range, std::vector<int32_t> &tokens) const {
    for (uint32_t at = range.begin; at < range.end; ++at) {
        const int32_t token = tokenizing.spelling[static_cast<uint8_t>(text[at])];
        if (token < 0 || banned(token)) {
            throw Failure(LANEWAY_BAD_ARGUMENT,
                          "it holds '" + std::string(text + range.begin, range.end - range.begin) +
                              "', which the vocabulary can only write as a special token; leave it out");
        }
        tokens.push_back(token);
    }
}

// A unigram tokenizer may put a space before each text that it is given, or behind it, also where we have cut one.
void Fragments::strip_spaces(const char *text, Range range, bool before, bool after, std::vector<int32_t> &tokens) const {
    if (before && !tokens.empty() && text[range.begin] != ' ' && begins_with(text_of(tokens.front()), escaped_space)) {
        std::vector<int32_t> rest;
        respell(text_of(tokens.front()).substr(escaped_space.size()), rest);
        tokens.erase(tokens.begin());
        tokens.insert(tokens.begin(), rest.begin(), rest.end());
    }
    if (after && !tokens.empty() && text[range.end - 1] != ' ' && ends_with(text_of(tokens.back()), escaped_space)) {
        const std::string_view last = text_of(tokens.back());
        tokens.pop_back();
        respell(last.substr(0, last.size() - escaped_space.size()), tokens);
    }
}

// Ordinary tokens for a part of a token's text: the longest that fits, again and again.
void Fragments::respell(std::string_view text, std::vector<int32_t> &tokens) const {
    while (!text.empty()) {
        size_t size = text.size();
        int32_t token = -1;
        for (; size > 0 && token < 0; --size) {
            const int32_t found = tokenizing.find(text.substr(0, size));
            token = found >= 0 && !tokenizing.specials.guarded(found, rules) ? found : -1;
        }
        if (token >= 0) {
            tokens.push_back(token);
            text.remove_prefix(size + 1);
        } else {
            tokens.push_back(tokenizing.unknown);
            text.remove_prefix(std::min(text.size(), character_bytes(text.front())));
        }
    }
}

// SentencePiece's merges as llama.cpp's llm_tokenizer_spm_session has them: of all neighbours that make a token together
// those with the best score are joined, the leftmost of equals first.  llama.cpp puts the space prefix before every
// piece, and its call cannot be stopped, so the merges are done here.
void Fragments::merge(const char *text, Range range, std::vector<int32_t> &tokens) const {
    std::string escaped = tokenizing.space_prefix ? std::string(escaped_space) : "";
    for (uint32_t at = range.begin; at < range.end; ++at) {
        if (text[at] == ' ') {
            escaped += escaped_space;
        } else {
            escaped += text[at];
        }
    }
    struct Symbol {
        int32_t previous;
        int32_t next;
        size_t begin;
        size_t size;
    };
    std::vector<Symbol> symbols;
    for (size_t at = 0; at < escaped.size();) {
        const auto index = static_cast<int32_t>(symbols.size());
        const size_t size = std::min(character_bytes(escaped[at]), escaped.size() - at);
        symbols.push_back({index - 1, at + size == escaped.size() ? -1 : index + 1, at, size});
        at += size;
    }
    const auto token_of = [&](size_t begin, size_t size) {
        const int32_t token = tokenizing.find(std::string_view(escaped).substr(begin, size));
        return token >= 0 && !banned(token) ? token : -1;
    };
    struct Pair {
        float score;
        int32_t left;
        int32_t right;
        size_t size;
    };
    const auto worse = [](const Pair &a, const Pair &b) {
        return a.score < b.score || (a.score == b.score && a.left > b.left);
    };
    std::priority_queue<Pair, std::vector<Pair>, decltype(worse)> queue(worse);
    const auto consider = [&](int32_t left, int32_t right) {
        if (left >= 0 && right >= 0) {
            const size_t size = symbols[left].size + symbols[right].size;
            const int32_t token = token_of(symbols[left].begin, size);
            if (token >= 0) {
                queue.push({llama_vocab_get_score(tokenizing.vocabulary, token), left, right, size});
            }
        }
    };
    for (int32_t right = 1; right < static_cast<int32_t>(symbols.size()); ++right) {
        if (right % between_looks == 0) {
            stop.look();
        }
        consider(right - 1, right);
    }
    for (size_t count = 0; !queue.empty(); ++count) {
        if (count % between_looks == 0) {
            stop.look();
        }
        const Pair pair = queue.top();
        queue.pop();
        Symbol &left = symbols[pair.left];
        Symbol &right = symbols[pair.right];
        if (left.size == 0 || right.size == 0 || left.size + right.size != pair.size) {
            continue; // one of them was joined to another since
        }
        left.size += right.size;
        right.size = 0;
        left.next = right.next;
        if (right.next >= 0) {
            symbols[right.next].previous = pair.left;
        }
        consider(left.previous, pair.left);
        consider(pair.left, left.next);
    }
    for (int32_t index = symbols.empty() ? -1 : 0; index >= 0; index = symbols[index].next) {
        const Symbol &symbol = symbols[index];
        const int32_t token = token_of(symbol.begin, symbol.size);
        if (token >= 0) {
            tokens.push_back(token);
            continue;
        }
        for (size_t at = symbol.begin; at < symbol.begin + symbol.size; ++at) {
            const std::string name = byte_name(static_cast<uint8_t>(escaped[at]));
            int32_t byte = tokenizing.find(name);
            if (byte < 0) {
                byte = tokenizing.find(std::string_view(escaped).substr(at, 1));
            }
            if (byte < 0 || banned(byte)) {
                throw Failure(LANEWAY_BAD_ARGUMENT, "the vocabulary has no token for the byte " + name);
            }
            tokens.push_back(byte);
        }
    }
}

} // namespace laneway
