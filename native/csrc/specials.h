// Finds the special tokens in a text, in one pass, with the outcome of llama.cpp's own search.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace laneway {

// Bytes of a text, the end excluded.
struct Range {
    uint32_t begin;
    uint32_t end;
};

// One byte that another thread sets to anything but 0; then the work ends soon.
class Stop {
public:
    explicit Stop(const uint8_t *flag) : flag(flag) {}
    // Throws LANEWAY_INTERRUPTED.
    void look() const;

private:
    const uint8_t *flag;
};

// Where the text of a special token is that token.
struct SpecialRules {
    bool everywhere = false;    // every special token, in the whole text
    std::vector<Range> written; // otherwise these hold all control tokens; in order, apart from each other
    std::vector<bool> markers;  // by token: user-defined ones that are treated like control tokens; may be empty
};

// A piece of a partitioned text: a special token, or text without any that counts (token -1).
struct Part {
    Range range;
    int32_t token;
};

// A place where texts of special tokens end that do not count there.  `begin` is where the shortest of them begins.
// llama.cpp finds some of them in any text; `visible` is where the shortest of these begins.
struct Refused {
    static constexpr uint32_t none = UINT32_MAX;
    uint32_t end;
    uint32_t begin = none;
    uint32_t visible = none;
};

struct Partition {
    std::vector<Part> parts;
    std::vector<Refused> refused; // ends ascend
};

// The special tokens of a vocabulary, as an automaton that finds all of them at once (Aho and Corasick, "Efficient string
// matching: an aid to bibliographic search", 1975).
class Specials {
public:
    explicit Specials(const llama_vocab *vocabulary);

    // Takes O(n log n) time and O(n) memory for n bytes, times the number of special tokens that end with one another.
    Partition partition(const char *text, uint32_t length, const SpecialRules &rules, const Stop &stop) const;

    // How many places there are where a special token ends, counted up to `most`.
    int32_t count(const char *text, size_t length, int32_t most) const;

    // Whether an answer of the tokenizer to plain text must not hold this token.
    bool guarded(int32_t token, const SpecialRules &rules) const;
    // Whether some of them swallow the whitespace beside them.
    bool strips() const { return any_strips; }

private:
    struct Special {
        int32_t token;
        uint32_t size;
        int32_t attributes;
    };
    struct Node {
        std::vector<std::pair<uint8_t, int32_t>> next; // by byte, ascending
        int32_t fallback = 0;                          // the longest other text that ends here and begins a special token
        int32_t special = -1;                          // the one that ends here
        int32_t shorter = -1;                          // the nearest node on the way of fallbacks where one ends
    };

    int32_t step(int32_t node, uint8_t byte) const;
    int32_t child(int32_t node, uint8_t byte) const;
    bool counts(const Special &special, uint32_t end, const SpecialRules &rules) const;
    void build();

    const llama_vocab *vocabulary;
    std::vector<Special> specials; // in the order in which llama.cpp looks for them
    std::vector<Node> nodes;
    std::vector<int32_t> attributes; // by token
    int32_t roots[256];              // what follows the first node
    bool any_strips = false;
};

} // namespace laneway
