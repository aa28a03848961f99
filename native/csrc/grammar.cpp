#include "grammar.h"

#include "sampling.h"

#include <algorithm>
#include <ctime>
#include <numeric>

namespace laneway {

namespace {

// Time that this thread has worked, whatever else the machine does.
double thread_seconds() {
#ifdef CLOCK_THREAD_CPUTIME_ID
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
#else
    return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
#endif
}

constexpr int64_t work_between_looks = 4096;

} // namespace

// ---- Budget

Budget::Budget(int64_t most_work, double most_seconds) : most_work(most_work), most_seconds(most_seconds) {}

void Budget::begin() {
    used = 0;
    next_look = std::min(work_between_looks, most_work + 1);
    began = thread_seconds();
}

void Budget::look() {
    const bool too_long = thread_seconds() - began > most_seconds;
    if (used > most_work || too_long) {
        throw Failure(LANEWAY_GRAMMAR_LIMIT,
                      "the grammar takes too long to follow: looking for one token took " +
                          (too_long ? "more than " + std::to_string(most_seconds) + " s"
                                    : "more than " + std::to_string(most_work) + " steps") +
                          ". Too many of its alternatives begin alike, or too many parts are optional: write them so that "
                          "the next character tells which one it is");
    }
    next_look = std::min(used + work_between_looks, most_work + 1);
}

// ---- Rules

Rules::Rules(const laneway_grammar &tables) {
    const auto demand = [](bool holds) {
        if (!holds) {
            throw Failure(LANEWAY_BAD_GRAMMAR, "the grammar's tables are damaged");
        }
    };
    demand(tables.rule_count > 0 && tables.alternative_count > 0 && tables.element_count > 0 && tables.set_count >= 0);
    demand(tables.root >= 0 && tables.root < tables.rule_count);
    root_rule = tables.root;
    rules.assign(tables.rules, tables.rules + tables.rule_count + 1);
    demand(rules.front() == 0 && rules.back() == tables.alternative_count && std::is_sorted(rules.begin(), rules.end()));
    for (int32_t i = 0; i < tables.alternative_count; ++i) {
        const int32_t position = tables.alternatives[i];
        // Each alternative has an end of its own, so that following one leads into no other.
        demand(position >= 0 && position < tables.element_count);
        demand(position == 0 || tables.elements[2 * (position - 1)] == Type::end);
        alternatives.push_back(static_cast<uint32_t>(position));
    }
    const int32_t range_count = tables.sets[tables.set_count];
    for (int32_t i = 0; i < range_count; ++i) {
        ranges.push_back({tables.ranges[2 * i], tables.ranges[2 * i + 1]});
        demand(ranges.back().low <= ranges.back().high);
    }
    for (int32_t i = 0; i < tables.set_count; ++i) {
        const int32_t first = tables.sets[i], last = tables.sets[i + 1];
        demand(first >= 0 && first <= last && last <= range_count);
        Set set = {{0, 0}, static_cast<size_t>(first), static_cast<size_t>(last)};
        for (int32_t r = first; r < last; ++r) {
            demand(r == first || ranges[static_cast<size_t>(r - 1)].high < ranges[static_cast<size_t>(r)].low);
            const Range &range = ranges[static_cast<size_t>(r)];
            for (uint32_t c = range.low; c <= std::min<uint32_t>(range.high, 127); ++c) {
                set.ascii[c / 64] |= uint64_t{1} << (c % 64);
            }
        }
        sets.push_back(set);
    }
    for (int32_t i = 0; i < tables.element_count; ++i) {
        const Element element = {tables.elements[2 * i], tables.elements[2 * i + 1]};
        switch (element.type) {
        case Type::end:
        case Type::token:
        case Type::not_token:
            break;
        case Type::rule:
            demand(element.value >= 0 && element.value < tables.rule_count);
            break;
        case Type::chars:
            demand(element.value >= 0 && element.value < tables.set_count);
            break;
        default:
            demand(false);
        }
        elements.push_back(element);
    }
    demand(elements.back().type == Type::end);
}

bool Rules::has(int32_t set, uint32_t character) const {
    const Set &it = sets[static_cast<size_t>(set)];
    if (character < 128) {
        return (it.ascii[character / 64] >> (character % 64)) & 1;
    }
    return meets(set, character, character);
}

bool Rules::meets(int32_t set, uint32_t low, uint32_t high) const {
    const Set &it = sets[static_cast<size_t>(set)];
    const auto begin = ranges.begin() + static_cast<std::ptrdiff_t>(it.first);
    const auto end = ranges.begin() + static_cast<std::ptrdiff_t>(it.last);
    const auto found = std::lower_bound(begin, end, low, [](const Range &range, uint32_t value) { return range.high < value; });
    return found != end && found->low <= high;
}

// ---- Moment

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

// ---- Matcher

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

bool Matcher::advance(const Point &from, uint32_t character, Point &to, Budget &budget) {
    begin_moment();
    const size_t begin = frontier.size();
    budget.spend(static_cast<int64_t>(from.end - from.begin));
    for (size_t i = from.begin; i < from.end; ++i) {
        const Place place = frontier[i];
        const Rules::Element &element = (*rules)[place.position];
        if (element.type == Rules::chars && rules->has(element.value, character)) {
            add(place.position + 1, place.node);
        }
    }
    close(budget);
    return marked(to, begin);
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
    begin_moment();
    const size_t begin = frontier.size();
    budget.spend(static_cast<int64_t>(from.end - from.begin));
    for (size_t i = from.begin; i < from.end; ++i) {
        const Place place = frontier[i];
        const Rules::Element &element = (*rules)[place.position];
        if ((element.type == Rules::token && element.value == token) ||
            (element.type == Rules::not_token && element.value != token && !named_only)) {
            add(place.position + 1, place.node);
        }
    }
    close(budget);
    return marked(to, begin);
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

// ---- Grammar

Grammar::Grammar(const Pieces &pieces, const laneway_grammar &tables)
    : budget(tables.most_work, tables.most_seconds), pieces(pieces), matcher(std::make_shared<Rules>(tables)) {
    budget.begin();
    here = matcher.start(budget);
}

void Grammar::restart_walk() {
    walked = {};
    path.clear();
}

// An end token ends the answer, so all of it must be an answer by then.
bool Grammar::ends_with(int32_t token) {
    if (here.accepts) { // never amid a character
        return true;
    }
    matcher.rewind(here);
    Matcher::Point after;
    return matcher.take(here, token, true, after, budget) && after.accepts;
}

// Whether the text of a piece may come next.
bool Grammar::walk(std::string_view piece) {
    size_t common = 0;
    const size_t most = std::min(piece.size(), walked.size());
    while (common < most && piece[common] == walked[common]) {
        ++common;
    }
    const size_t died = path.size(); // the byte of what was walked that led nowhere, if there is one
    if (died < walked.size() && common > died) {
        return false;
    }
    path.resize(std::min(common, died));
    while (path.size() < piece.size()) {
        const Matcher::Point from = path.empty() ? here : path.back();
        matcher.rewind(from);
        Matcher::Point to;
        if (!matcher.step(from, static_cast<uint8_t>(piece[path.size()]), to, budget)) {
            break;
        }
        path.push_back(to);
    }
    walked = piece;
    return path.size() == piece.size() && matcher.may_pause(path.back(), budget);
}

bool Grammar::allows(int32_t token) {
    if (pieces.is_end(token)) {
        return ends_with(token);
    }
    const std::string_view piece = pieces[token];
    budget.spend(1);
    if (!piece.empty()) {
        restart_walk();
        if (walk(piece)) {
            return true;
        }
    }
    if (!matcher.names_tokens(here)) {
        return false;
    }
    matcher.rewind(here);
    Matcher::Point after;
    return matcher.take(here, token, false, after, budget);
}

void Grammar::filter(std::vector<Candidate> &candidates) {
    // In the order of their pieces, so that what begins alike is followed once.
    std::vector<uint32_t> order(candidates.size());
    std::iota(order.begin(), order.end(), 0u);
    if (candidates.size() > static_cast<size_t>(pieces.count()) / 8) {
        std::vector<int32_t> at(static_cast<size_t>(pieces.count()), -1);
        for (const uint32_t index : order) {
            at[static_cast<size_t>(pieces.rank(candidates[index].id))] = static_cast<int32_t>(index);
        }
        order.clear();
        for (const int32_t index : at) {
            if (index >= 0) {
                order.push_back(static_cast<uint32_t>(index));
            }
        }
    } else {
        std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return pieces.rank(candidates[a].id) < pieces.rank(candidates[b].id);
        });
    }
    std::vector<uint8_t> allowed(candidates.size());
    restart_walk();
    for (const uint32_t index : order) {
        const int32_t token = candidates[index].id;
        const std::string_view piece = pieces[token];
        budget.spend(1);
        allowed[index] = !pieces.is_end(token) && !piece.empty() && walk(piece);
    }
    const bool names = matcher.names_tokens(here);
    for (size_t i = 0; i < candidates.size(); ++i) {
        const int32_t token = candidates[i].id;
        if (pieces.is_end(token)) {
            allowed[i] = ends_with(token);
        } else if (names && !allowed[i]) {
            matcher.rewind(here);
            Matcher::Point after;
            allowed[i] = matcher.take(here, token, false, after, budget);
        }
    }
    size_t kept = 0;
    for (size_t i = 0; i < candidates.size(); ++i) {
        if (allowed[i]) {
            candidates[kept++] = candidates[i];
        }
    }
    candidates.resize(kept);
}

bool Grammar::begins(const std::vector<uint8_t> &forbidden) {
    budget.begin();
    restart_walk();
    const bool names = matcher.names_tokens(here);
    for (int32_t place = 0; place < pieces.count(); ++place) {
        const int32_t token = pieces.at_rank(place);
        if (forbidden[static_cast<size_t>(token)]) {
            continue;
        }
        budget.spend(1);
        if (pieces.is_end(token)) {
            if (ends_with(token)) {
                return true;
            }
            restart_walk();
            continue;
        }
        const std::string_view piece = pieces[token];
        if (!piece.empty() && walk(piece)) {
            return true;
        }
        if (names) {
            matcher.rewind(here);
            Matcher::Point after;
            if (matcher.take(here, token, false, after, budget)) {
                return true;
            }
            restart_walk();
        }
    }
    return false;
}

void Grammar::accept(int32_t token) {
    restart_walk();
    matcher.rewind(here);
    const std::string_view piece = pieces[token];
    Matcher::Point text = here, named;
    bool as_text = !piece.empty();
    for (const char byte : piece) {
        Matcher::Point to;
        if (!matcher.step(text, static_cast<uint8_t>(byte), to, budget)) {
            as_text = false;
            break;
        }
        text = to;
    }
    as_text = as_text && matcher.may_pause(text, budget);
    // A state is amid a character or not.  Where both would do, the text counts: less is allowed then, never more.
    const bool as_named = !(as_text && text.partial.missing > 0) && matcher.names_tokens(here) &&
                          matcher.take(here, token, false, named, budget);
    here = matcher.keep(as_text ? &text : nullptr, as_named ? &named : nullptr);
}

} // namespace laneway
