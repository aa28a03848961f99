// A context-free grammar as tables, and what searching it may cost.
#pragma once

#include "laneway.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace laneway {

// What one search may cost.  Work counts positions looked at; it is the same on every machine, time is not.
class Budget {
public:
    Budget(int64_t most_work, double most_seconds);
    void begin();
    // Throws LANEWAY_GRAMMAR_LIMIT.
    void spend(int64_t work) {
        used += work;
        if (used >= next_look) {
            look();
        }
    }
    int64_t work() const { return used; }

private:
    void look();

    int64_t most_work;
    double most_seconds;
    int64_t used = 0;
    int64_t next_look = 0;
    double began = 0;
};

// The tables, copied and checked.
class Rules {
public:
    enum Type : int32_t { end, rule, chars, token, not_token };
    struct Element {
        int32_t type;
        int32_t value;
    };

    // Throws LANEWAY_BAD_GRAMMAR for numbers that lead out of the tables.
    explicit Rules(const laneway_grammar &tables);

    const Element &operator[](uint32_t position) const { return elements[position]; }
    int32_t root() const { return root_rule; }
    // first, last: into alternative()
    int32_t first_of(int32_t rule) const { return rules[static_cast<size_t>(rule)]; }
    int32_t last_of(int32_t rule) const { return rules[static_cast<size_t>(rule) + 1]; }
    uint32_t alternative(int32_t index) const { return alternatives[static_cast<size_t>(index)]; }
    int32_t rule_count() const { return static_cast<int32_t>(rules.size()) - 1; }
    bool has(int32_t set, uint32_t character) const;
    // Whether a set has any of low to high.
    bool meets(int32_t set, uint32_t low, uint32_t high) const;

private:
    struct Set {
        uint64_t ascii[2];
        size_t first, last; // of its ranges
    };
    struct Range {
        uint32_t low, high;
    };

    std::vector<Element> elements;
    std::vector<uint32_t> alternatives;
    std::vector<int32_t> rules;
    std::vector<Set> sets;
    std::vector<Range> ranges;
    int32_t root_rule;
};

} // namespace laneway
