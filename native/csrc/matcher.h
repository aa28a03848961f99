// Follows a text through a context-free grammar, byte by byte.
//
// All ways through the grammar are followed at once: stacks that agree in what they are about are shared, so that even
// an ambiguous grammar takes time that is polynomial in the text's length, where a list of all stacks may double with
// each character.  Left recursion needs no care.  The method is that of GLL recognisers (Scott and Johnstone, "GLL
// Parsing", 2010), one character at a time; a call at the end of an alternative returns straight to its caller's caller,
// so that lists do not make stacks deep.
#pragma once

#include "rules.h"

#include <memory>

namespace laneway {

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
    // To the places behind the elements that `wanted` takes.
    template <typename Wanted>
    bool move(const Point &from, Point &to, Budget &budget, Wanted wanted);
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

} // namespace laneway
