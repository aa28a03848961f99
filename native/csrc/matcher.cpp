#include "matcher.h"

#include <algorithm>

namespace laneway {

bool Moment::insert(uint32_t a, uint32_t b, uint32_t c) {
    if (2 * count >= slots.size()) {
        grow();
    }
    uint64_t hash = (a * 0x9e3779b97f4a7c15ULL) ^ (b * 0xc2b2ae3d27d4eb4fULL) ^ (c * 0x165667b19e3779f9ULL);
    hash ^= hash >> 29;
    for (size_t at = hash & (slots.size() - 1);; at = (at + 1) & (slots.size() - 1)) {
        Slot &slot = slots[at];
        if (slot.when != now) {
            slot = {a, b, c, now};
            ++count;
            return true;
        }
        if (slot.a == a && slot.b == b && slot.c == c) {
            return false;
        }
    }
}

void Moment::grow() {
    std::vector<Slot> old(2 * slots.size());
    old.swap(slots);
    count = 0;
    for (const Slot &slot : old) {
        if (slot.when == now) {
            insert(slot.a, slot.b, slot.c);
        }
    }
}

Matcher::Matcher(std::shared_ptr<const Rules> given)
    : rules(std::move(given)), called(static_cast<size_t>(rules->rule_count())),
      called_when(static_cast<size_t>(rules->rule_count())) {}

void Matcher::rewind(const Point &point) {
    frontier.resize(point.end);
    nodes.resize(point.nodes);
    edges.resize(point.edges);
    followers.resize(point.followers);
}

void Matcher::begin_moment() {
    ++moment;
    accepts = false;
    todo.clear();
    new_edges.clear();
    seen_places.forget();
    seen_edges.forget();
}

Matcher::Point Matcher::start(Budget &budget) {
    begin_moment();
    const size_t begin = frontier.size();
    const auto root = static_cast<size_t>(rules->root());
    const auto node = static_cast<uint32_t>(nodes.size());
    nodes.push_back({none, none, moment});
    called[root] = node;
    called_when[root] = moment;
    connect({node, none, 0}, budget);
    for (int32_t i = rules->first_of(rules->root()); i < rules->last_of(rules->root()); ++i) {
        add(rules->alternative(i), node);
    }
    close(budget);
    Point point;
    marked(point, begin);
    return point;
}

void Matcher::add(uint32_t position, uint32_t node) {
    if (seen_places.insert(position, node, 0)) {
        todo.push_back({position, node});
    }
}

void Matcher::follow(uint32_t position, uint32_t node) {
    if (position == none) {
        accepts = true;
    } else {
        add(position, node);
    }
}

// Takes all steps that need no character.
void Matcher::close(Budget &budget) {
    while (true) {
        if (!new_edges.empty()) {
            const NewEdge edge = new_edges.back();
            new_edges.pop_back();
            connect(edge, budget);
            continue;
        }
        if (todo.empty()) {
            return;
        }
        const Place place = todo.back();
        todo.pop_back();
        budget.spend(1);
        switch ((*rules)[place.position].type) {
        case Rules::end:
            finish(place.node, budget);
            break;
        case Rules::rule:
            call(place.position, place.node, budget);
            break;
        default:
            frontier.push_back(place);
        }
    }
}

void Matcher::call(uint32_t position, uint32_t node, Budget &budget) {
    const int32_t rule = (*rules)[position].value;
    const auto index = static_cast<size_t>(rule);
    if (called_when[index] != moment) {
        called[index] = static_cast<uint32_t>(nodes.size());
        called_when[index] = moment;
        nodes.push_back({none, none, moment});
        for (int32_t i = rules->first_of(rule); i < rules->last_of(rule); ++i) {
            add(rules->alternative(i), called[index]);
        }
    }
    const uint32_t callee = called[index];
    if ((*rules)[position + 1].type != Rules::end) {
        connect({callee, position + 1, node}, budget);
    } else {
        for (uint32_t e = nodes[node].edges; e != none; e = edges[e].next) {
            budget.spend(1);
            new_edges.push_back({callee, edges[e].position, edges[e].node});
        }
        // Edges that the caller gets later in this moment are the callee's as well.
        if (nodes[node].moment == moment && seen_edges.insert(node, none - 1, callee)) {
            followers.push_back({callee, nodes[node].followers});
            nodes[node].followers = static_cast<uint32_t>(followers.size() - 1);
        }
    }
}

void Matcher::connect(const NewEdge &edge, Budget &budget) {
    budget.spend(1);
    if (!seen_edges.insert(edge.node, edge.position, edge.to)) {
        return;
    }
    Node &node = nodes[edge.node];
    edges.push_back({edge.position, edge.to, node.edges});
    node.edges = static_cast<uint32_t>(edges.size() - 1);
    if (node.ended) {
        follow(edge.position, edge.to);
    }
    for (uint32_t f = node.followers; f != none; f = followers[f].next) {
        new_edges.push_back({followers[f].node, edge.position, edge.to});
    }
}

void Matcher::finish(uint32_t node, Budget &budget) {
    if (nodes[node].moment == moment) {
        if (nodes[node].ended) {
            return;
        }
        nodes[node].ended = true;
    }
    for (uint32_t e = nodes[node].edges; e != none; e = edges[e].next) {
        budget.spend(1);
        follow(edges[e].position, edges[e].node);
    }
}

// Writes down what the moment came to; false: nothing goes on from here.
bool Matcher::marked(Point &to, size_t begin) {
    to.begin = begin;
    to.end = frontier.size();
    to.nodes = nodes.size();
    to.edges = edges.size();
    to.followers = followers.size();
    to.accepts = accepts;
    to.partial = {};
    return accepts || to.begin != to.end;
}

template <typename Wanted>
bool Matcher::move(const Point &from, Point &to, Budget &budget, Wanted wanted) {
    begin_moment();
    const size_t begin = frontier.size();
    budget.spend(static_cast<int64_t>(from.end - from.begin));
    for (size_t i = from.begin; i < from.end; ++i) {
        const Place place = frontier[i];
        if (wanted((*rules)[place.position])) {
            add(place.position + 1, place.node);
        }
    }
    close(budget);
    return marked(to, begin);
}

bool Matcher::advance(const Point &from, uint32_t character, Point &to, Budget &budget) {
    return move(from, to, budget, [&](const Rules::Element &element) {
        return element.type == Rules::chars && rules->has(element.value, character);
    });
}

bool Matcher::step(const Point &from, uint8_t byte, Point &to, Budget &budget) {
    Partial partial = from.partial;
    if (partial.missing > 0) {
        if (byte < partial.low || byte > partial.high) {
            return false;
        }
        partial = {(partial.value << 6) | (byte & 0x3fu), partial.missing - 1};
    } else if (byte < 0x80) {
        return advance(from, byte, to, budget);
    } else if (byte >= 0xc2 && byte <= 0xdf) {
        partial = {byte & 0x1fu, 1};
    } else if (byte >= 0xe0 && byte <= 0xef) {
        // No second way to write a shorter one, and no halves of pairs.
        partial = {byte & 0x0fu, 2, static_cast<uint8_t>(byte == 0xe0 ? 0xa0 : 0x80),
                   static_cast<uint8_t>(byte == 0xed ? 0x9f : 0xbf)};
    } else if (byte >= 0xf0 && byte <= 0xf4) {
        partial = {byte & 0x07u, 3, static_cast<uint8_t>(byte == 0xf0 ? 0x90 : 0x80),
                   static_cast<uint8_t>(byte == 0xf4 ? 0x8f : 0xbf)};
    } else {
        return false;
    }
    if (partial.missing == 0) {
        return advance(from, partial.value, to, budget);
    }
    budget.spend(1);
    to = from;
    to.accepts = false;
    to.partial = partial;
    return true;
}

bool Matcher::take(const Point &from, int32_t token, bool named_only, Point &to, Budget &budget) {
    if (from.partial.missing > 0) {
        return false;
    }
    return move(from, to, budget, [&](const Rules::Element &element) {
        return (element.type == Rules::token && element.value == token) ||
               (element.type == Rules::not_token && element.value != token && !named_only);
    });
}

bool Matcher::may_pause(const Point &point, Budget &budget) const {
    const Partial &partial = point.partial;
    if (partial.missing == 0) {
        return true;
    }
    const uint32_t tail = 6u * static_cast<uint32_t>(partial.missing - 1);
    const uint32_t low = ((partial.value << 6) | (partial.low & 0x3fu)) << tail;
    const uint32_t high = ((((partial.value << 6) | (partial.high & 0x3fu)) + 1) << tail) - 1;
    budget.spend(static_cast<int64_t>(point.end - point.begin));
    return std::any_of(frontier.begin() + static_cast<std::ptrdiff_t>(point.begin),
                       frontier.begin() + static_cast<std::ptrdiff_t>(point.end), [&](const Place &place) {
                           const Rules::Element &element = (*rules)[place.position];
                           return element.type == Rules::chars && rules->meets(element.value, low, high);
                       });
}

bool Matcher::names_tokens(const Point &point) const {
    return std::any_of(frontier.begin() + static_cast<std::ptrdiff_t>(point.begin),
                       frontier.begin() + static_cast<std::ptrdiff_t>(point.end), [&](const Place &place) {
                           return (*rules)[place.position].type != Rules::chars;
                       });
}

Matcher::Point Matcher::keep(const Point *one, const Point *other) {
    std::vector<Place> kept;
    for (const Point *point : {one, other}) {
        if (point) {
            kept.insert(kept.end(), frontier.begin() + static_cast<std::ptrdiff_t>(point->begin),
                        frontier.begin() + static_cast<std::ptrdiff_t>(point->end));
        }
    }
    const auto less = [](const Place &a, const Place &b) {
        return a.position != b.position ? a.position < b.position : a.node < b.node;
    };
    const auto same = [](const Place &a, const Place &b) { return a.position == b.position && a.node == b.node; };
    std::sort(kept.begin(), kept.end(), less);
    kept.erase(std::unique(kept.begin(), kept.end(), same), kept.end());
    frontier = std::move(kept);
    followers.clear(); // they matter to the moment that made them
    if (nodes.size() + edges.size() > compact_at) {
        compact();
        compact_at = 2 * (nodes.size() + edges.size()) + 4096;
    }
    Point point;
    accepts = (one && one->accepts) || (other && other->accepts);
    marked(point, 0);
    point.partial = one ? one->partial : Partial{};
    return point;
}

// Forgets nodes that the frontier does not lead back to.
void Matcher::compact() {
    std::vector<uint32_t> number(nodes.size(), none);
    std::vector<uint32_t> live;
    const auto reach = [&](uint32_t node) {
        if (number[node] == none) {
            number[node] = static_cast<uint32_t>(live.size());
            live.push_back(node);
        }
    };
    for (const Place &place : frontier) {
        reach(place.node);
    }
    std::vector<Node> new_nodes;
    std::vector<Edge> kept_edges;
    for (size_t i = 0; i < live.size(); ++i) {
        Node node = nodes[live[i]];
        uint32_t first = none;
        for (uint32_t e = node.edges; e != none; e = edges[e].next) {
            const bool ends = edges[e].position == none;
            if (!ends) {
                reach(edges[e].node);
            }
            kept_edges.push_back({edges[e].position, ends ? 0 : number[edges[e].node], first});
            first = static_cast<uint32_t>(kept_edges.size() - 1);
        }
        node.edges = first;
        node.followers = none;
        new_nodes.push_back(node);
    }
    for (Place &place : frontier) {
        place.node = number[place.node];
    }
    nodes = std::move(new_nodes);
    edges = std::move(kept_edges);
}

} // namespace laneway
