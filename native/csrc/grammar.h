// Says which tokens may come next in an answer of a grammar.
#pragma once

#include "matcher.h"
#include "pieces.h"

namespace laneway {

struct Candidate;

// A grammar and an answer so far.
class Grammar {
public:
    Grammar(const Pieces &pieces, const laneway_grammar &tables);

    bool allows(int32_t token);
    // Keeps the candidates that are allowed, in their order.
    void filter(std::vector<Candidate> &candidates);
    void accept(int32_t token);
    // Whether any token may come first for which forbidden says 0.
    bool begins(const std::vector<uint8_t> &forbidden);

    Budget budget;

private:
    bool ends_with(int32_t token);
    bool walk(std::string_view piece);
    void restart_walk();

    const Pieces &pieces;
    Matcher matcher;
    Matcher::Point here;
    // The walk over pieces, each of which begins where the one before it began to differ.
    std::string_view walked;
    std::vector<Matcher::Point> path; // after each byte of what was walked, as far as the grammar goes
};

} // namespace laneway
