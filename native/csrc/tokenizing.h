// Text to tokens: special tokens are found here, and what lies between them is llama.cpp's work.
#pragma once

#include "specials.h"

#include <array>
#include <string_view>
#include <unordered_map>

namespace laneway {

// How vocabularies name the token of one byte: <0x0A>.
std::string byte_name(int byte);

class Tokenizing {
public:
    Tokenizing(const llama_model *model, const llama_vocab *vocabulary);

    // As llama_tokenize without a beginning and an end.  With `rules.everywhere` it is what that gives for parse_special;
    // otherwise the text of a control token (or a marker) that does not count becomes tokens that spell it.
    // calls: how often llama.cpp was asked.  Throws LANEWAY_INTERRUPTED, and LANEWAY_BAD_ARGUMENT for a text that this
    // vocabulary cannot spell.
    std::vector<int32_t> run(const char *text, uint32_t length, const Rules &rules, const Stop &stop, int32_t *calls) const;

    // How many special tokens the text holds, counted up to `most`.
    int32_t count_specials(const char *text, size_t length, int32_t most) const {
        return specials.count(text, length, most);
    }

    // No text of these bytes has fewer tokens.  0 where the tokenizer may drop or join what it reads.
    int64_t least(const char *text, size_t length) const;

private:
    friend class Fragments;

    enum llama_vocab_type type() const { return llama_vocab_type(vocabulary); }
    int32_t find(std::string_view text) const;
    void measure(const std::string &tokenizer);

    const llama_vocab *vocabulary;
    Specials specials;
    std::unordered_map<std::string_view, int32_t> by_text; // the texts are the library's
    std::array<int32_t, 256> spelling;                     // the token that is this one byte; -1: none
    std::array<uint32_t, 256> longest{};                   // bytes of the longest token with such a byte; 0: it may vanish
    int32_t unknown = -1;
    bool space_prefix = false; // SPM puts a space before what begins a text or follows a special token
};

} // namespace laneway
