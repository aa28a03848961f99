// Follows an answer through a context-free grammar, and says which tokens may come next.
//
// The grammar comes as tables (laneway_native._grammar makes them).  All ways through it are followed at once: stacks
// that agree in what they are about are shared, so that even an ambiguous grammar takes time that is polynomial in the
// answer's length, where a list of all stacks may double with each character.  Left recursion needs no care.  The method
// is that of GLL recognisers (Scott and Johnstone, "GLL Parsing", 2010), one character at a time; a call at the end of
// an alternative returns straight to its caller's caller, so that lists do not make stacks deep.
#pragma once

#include "failure.h"
#include "laneway.h"
#include "pieces.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace laneway {

struct Candidate;

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

// Triples of numbers that belong to one moment; forgetting all of them costs nothing.
class Moment {
public:
    Moment() : slots(256) {}
    void forget() {
        ++now;
        count = 0;
    }
    // False if it was there.
    bool insert(uint32_t a, uint32_t b, uint32_t c);

private:
    struct Slot {
        uint32_t a, b, c;
        uint64_t when;
    };
    void grow();

    std::vector<Slot> slots;
    uint64_t now = 1;
    size_t count = 0;
};

// A character that has begun: bytes that are missing, and what the next one may be.
struct Partial {
    uint32_t value = 0;
    int32_t missing = 0;
    uint8_t low = 0x80, high = 0xbf;
};

class Matcher {
public:
    // A place in an answer.  What belongs to it lies in arenas up to the marks.
    struct Point {
        size_t begin, end; // of its frontier
        size_t nodes, edges, followers;
        bool accepts;
        Partial partial;
    };

    explicit Matcher(std::shared_ptr<const Rules> rules);

    // The beginning of an answer.
    Point start(Budget &budget);
    // Forgets what came after a point.
    void rewind(const Point &point);
    // One byte further; false: no answer goes on so.
    bool step(const Point &from, uint8_t byte, Point &to, Budget &budget);
    // One whole token further that the grammar names, or names as one that must not come.
    bool take(const Point &from, int32_t token, bool named_only, Point &to, Budget &budget);
    // Whether a token may end here: not amid a character that cannot become one that fits.
    bool may_pause(const Point &point, Budget &budget) const;
    // Keeps what belongs to one point, or to two at once, and forgets the rest.
    Point keep(const Point *one, const Point *other);
    bool names_tokens(const Point &point) const;

private:
    static constexpr uint32_t none = 0xffffffff;
    struct Place {
        uint32_t position;
        uint32_t node;
    };
    // A rule that was called somewhere: edges say where it returns to, followers which calls at the end of an
    // alternative of it return there as well.
    struct Node {
        uint32_t edges = none;
        uint32_t followers = none;
        uint64_t moment;
        bool ended = false; // at the moment of its call: it takes nothing
    };
    struct Edge {
        uint32_t position; // none: the answer may end
        uint32_t node;
        uint32_t next;
    };
    struct Follower {
        uint32_t node;
        uint32_t next;
    };
    struct NewEdge {
        uint32_t node, position, to;
    };

    void begin_moment();
    void close(Budget &budget);
    void add(uint32_t position, uint32_t node);
    void call(uint32_t position, uint32_t node, Budget &budget);
    void connect(const NewEdge &edge, Budget &budget);
    void finish(uint32_t node, Budget &budget);
    void follow(uint32_t position, uint32_t node);
    bool advance(const Point &from, uint32_t character, Point &to, Budget &budget);
    bool marked(Point &to, size_t begin);
    void compact();

    std::shared_ptr<const Rules> rules;
    std::vector<Place> frontier;
    std::vector<Node> nodes;
    std::vector<Edge> edges;
    std::vector<Follower> followers;
    size_t compact_at = 4096;

    // Of the moment, that is, of one character.
    uint64_t moment = 0;
    bool accepts = false;
    std::vector<Place> todo;
    std::vector<NewEdge> new_edges;
    Moment seen_places, seen_edges;
    std::vector<uint32_t> called;      // rule -> node
    std::vector<uint64_t> called_when; // rule -> moment
};

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
