// Text without special tokens that count, to tokens.
#pragma once

#include "tokenizing.h"

namespace laneway {

// For one text: what was asked once is remembered.
class Fragments {
public:
    Fragments(const Tokenizing &tokenizing, const Rules &rules, const Stop &stop)
        : tokenizing(tokenizing), rules(rules), stop(stop) {}

    // Appends the tokens of a part of a text; first to last are those special tokens that do not count and end in it.
    void add(const char *text, Range range, const Refused *first, const Refused *last, std::vector<int32_t> &tokens);
    int32_t calls() const { return asked; }

private:
    struct Piece {
        Range range;
        bool spelled; // byte by byte
    };

    std::string_view text_of(int32_t token) const;
    bool banned(int32_t token) const;
    std::vector<Piece> cut(const char *text, Range range, const Refused *first, const Refused *last, bool all) const;
    bool add_pieces(const char *text, const std::vector<Piece> &pieces, std::vector<int32_t> &tokens);
    void spell(const char *text, Range range, std::vector<int32_t> &tokens) const;
    void respell(std::string_view text, std::vector<int32_t> &tokens) const;
    void strip_spaces(const char *text, Range range, bool before, bool after, std::vector<int32_t> &tokens) const;
    std::vector<int32_t> ask(const char *text, Range range);
    void merge(const char *text, Range range, std::vector<int32_t> &tokens) const;

    const Tokenizing &tokenizing;
    const Rules &rules;
    const Stop &stop;
    std::unordered_map<std::string, std::vector<int32_t>> known;
    int32_t asked = 0;
};

} // namespace laneway
