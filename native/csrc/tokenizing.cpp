#include "tokenizing.h"

#include "border.h"
#include "fragments.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace laneway {

namespace {

constexpr std::string_view escaped_space = "\xe2\x96\x81"; // U+2581, which stands for a space in many vocabularies

std::string metadata(const llama_model *model, const char *key) {
    char text[64];
    const int32_t length = llama_model_meta_val_str(model, key, text, sizeof text);
    return length < 0 ? "" : std::string(text, std::min<size_t>(length, sizeof text - 1));
}

std::string piece_of(const llama_vocab *vocabulary, int32_t token) {
    std::string piece(64, '\0');
    int32_t length = llama_token_to_piece(vocabulary, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    if (length < 0) {
        piece.resize(-length);
        length = llama_token_to_piece(vocabulary, token, piece.data(), static_cast<int32_t>(piece.size()), 0, true);
    }
    piece.resize(std::max(0, length));
    return piece;
}

} // namespace

std::string byte_name(int byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
    return name;
}

Tokenizing::Tokenizing(const llama_model *model, const llama_vocab *vocabulary)
    : vocabulary(vocabulary), specials(vocabulary) {
    const int32_t count = llama_vocab_n_tokens(vocabulary);
    by_text.reserve(count);
    spelling.fill(-1);
    for (int32_t token = 0; token < count; ++token) {
        by_text[llama_vocab_get_text(vocabulary, token)] = token; // of two with one text llama.cpp keeps the last
        const int32_t attribute = llama_vocab_get_attr(vocabulary, token);
        if (unknown < 0 && (attribute & LLAMA_TOKEN_ATTR_UNKNOWN)) {
            unknown = token;
        }
        if (attribute & (LLAMA_TOKEN_ATTR_NORMAL | LLAMA_TOKEN_ATTR_BYTE)) {
            const std::string piece = piece_of(vocabulary, token);
            if (piece.size() == 1) {
                spelling[static_cast<uint8_t>(piece[0])] = token;
            }
        }
    }
    if (type() == LLAMA_VOCAB_TYPE_SPM) {
        space_prefix = metadata(model, "tokenizer.ggml.add_space_prefix") != "false";
    }
    measure(metadata(model, "tokenizer.ggml.model") + "/" + metadata(model, "tokenizer.ggml.pre"));
}

int32_t Tokenizing::find(std::string_view text) const {
    const auto found = by_text.find(text);
    return found == by_text.end() ? -1 : found->second;
}

// Each token stands for bytes of the text, no more of them than its own text has, and each byte is in one token.  A token
// of n bytes is worth at most 1 / n for each of them, so a byte is worth no less than 1 over the longest token that has it.
// Bytes that may vanish are worth nothing.
void Tokenizing::measure(const std::string &tokenizer) {
    const bool bpe = type() == LLAMA_VOCAB_TYPE_BPE;
    // WordPiece and unigram tokenizers normalise, PLaMo's drops a byte order mark, and these two whitespace or letters.
    if (!(bpe || type() == LLAMA_VOCAB_TYPE_SPM || type() == LLAMA_VOCAB_TYPE_RWKV) ||
        tokenizer.find("hybriddna") != std::string::npos || tokenizer.find("whitespace") != std::string::npos) {
        return;
    }
    // Whether the pieces of this vocabulary are written in the alphabet of GPT-2, in which a line feed is a letter.
    const int32_t line_feed = find("\xc4\x8a");
    const bool alphabet = bpe && line_feed >= 0 && piece_of(vocabulary, line_feed) == "\n";
    std::array<uint32_t, 256> most;
    most.fill(1);
    const auto holds = [&](std::string_view bytes, size_t size) {
        for (const char byte : bytes) {
            uint32_t &size_here = most[static_cast<uint8_t>(byte)];
            size_here = std::max(size_here, static_cast<uint32_t>(size));
        }
    };
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocabulary); ++token) {
        const std::string piece = piece_of(vocabulary, token);
        const std::string_view text = llama_vocab_get_text(vocabulary, token);
        const size_t size = std::max(piece.size(), text.size());
        if (alphabet && (llama_vocab_get_attr(vocabulary, token) & LLAMA_TOKEN_ATTR_NORMAL)) {
            holds(piece, piece.size());
            continue;
        }
        holds(text, size);
        holds(piece, size);
        if (text.find(escaped_space) != std::string_view::npos) {
            holds(" ", size);
        }
    }
    for (int byte = 0; byte < 256; ++byte) {
        // What a BPE tokenizer has no token for vanishes.  Where merges lead to a text that is no token, llama.cpp looks
        // for its bytes one by one, and letters of that alphabet beyond ASCII have two.
        const bool vanishes = alphabet ? byte <= 0x20 || byte >= 0x7F || find(std::string(1, static_cast<char>(byte))) < 0
                                       : bpe && find(byte_name(byte)) < 0;
        const bool stripped = specials.strips() && std::isspace(byte);
        longest[byte] = vanishes || stripped ? 0 : most[byte];
    }
}

int64_t Tokenizing::least(const char *text, size_t length) const {
    std::array<uint64_t, 256> counts{};
    for (size_t at = 0; at < length; ++at) {
        ++counts[static_cast<uint8_t>(text[at])];
    }
    double sum = 0.0;
    for (int byte = 0; byte < 256; ++byte) {
        if (counts[byte] && longest[byte]) {
            sum += static_cast<double>(counts[byte]) / longest[byte];
        }
    }
    // Rounded up, but for what rounding may have added to 256 sums.
    return static_cast<int64_t>(std::ceil(sum * (1.0 - 1e-12) - 1e-9));
}

std::vector<int32_t> Tokenizing::run(const char *text, uint32_t length, const SpecialRules &rules, const Stop &stop,
                                     int32_t *calls) const {
    const Partition partition = specials.partition(text, length, rules, stop);
    Fragments fragments(*this, rules, stop);
    std::vector<int32_t> tokens;
    size_t next = 0;
    for (const Part &part : partition.parts) {
        if (part.token >= 0) {
            tokens.push_back(part.token);
            continue;
        }
        stop.look();
        // Those that lie in this part whole.
        while (next < partition.refused.size() && partition.refused[next].end <= part.range.begin) {
            ++next;
        }
        const auto *first = partition.refused.data() + next;
        while (next < partition.refused.size() && partition.refused[next].end <= part.range.end) {
            ++next;
        }
        fragments.add(text, part.range, first, partition.refused.data() + next, tokens);
    }
    *calls = fragments.calls();
    return tokens;
}

} // namespace laneway
