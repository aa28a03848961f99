// The precedence of special tokens is that of llama.cpp's tokenizer_st_partition and of the list that it walks,
// cache_special_tokens (src/llama-vocab.cpp): the longest text first, over the whole text, then the next longest in what
// lies between; of one token the leftmost first.  A token with LSTRIP or RSTRIP takes the whitespace beside it along.
// Walking the list token by token costs a pass over the text for each of them, and llama.cpp counts its way through the
// pieces for each one that it finds, so its time grows with the square of their number.
#include "specials.h"

#include "border.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <queue>

namespace laneway {

namespace {

constexpr int32_t control = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
constexpr uint32_t between_looks = 1 << 16;

// llama.cpp asks the same question, of a signed char.
bool is_space(char byte) { return std::isspace(static_cast<unsigned char>(byte)) != 0; }

} // namespace

void Stop::look() const {
    if (flag && __atomic_load_n(flag, __ATOMIC_RELAXED)) {
        throw Failure(LANEWAY_INTERRUPTED, "tokenising was stopped");
    }
}

Specials::Specials(const llama_vocab *vocabulary) : vocabulary(vocabulary) {
    const int32_t count = llama_vocab_n_tokens(vocabulary);
    attributes.resize(count);
    for (int32_t token = 0; token < count; ++token) {
        const int32_t attribute = llama_vocab_get_attr(vocabulary, token);
        attributes[token] = attribute;
        if (attribute & (control | LLAMA_TOKEN_ATTR_USER_DEFINED)) {
            const uint32_t size = std::strlen(llama_vocab_get_text(vocabulary, token));
            specials.push_back({token, size, attribute});
            any_strips |= (attribute & (LLAMA_TOKEN_ATTR_LSTRIP | LLAMA_TOKEN_ATTR_RSTRIP)) != 0;
        }
    }
    // std::sort, of the same list by the same order: so texts of one length come out as they do in llama.cpp.
    std::sort(specials.begin(), specials.end(), [](const Special &a, const Special &b) { return a.size > b.size; });
    build();
}

void Specials::build() {
    nodes.emplace_back();
    for (size_t index = 0; index < specials.size(); ++index) {
        const char *text = llama_vocab_get_text(vocabulary, specials[index].token);
        int32_t node = 0;
        for (uint32_t at = 0; at < specials[index].size; ++at) {
            const auto byte = static_cast<uint8_t>(text[at]);
            int32_t next = child(node, byte);
            if (next < 0) {
                next = static_cast<int32_t>(nodes.size());
                nodes.emplace_back();
                auto &edges = nodes[node].next;
                edges.insert(std::upper_bound(edges.begin(), edges.end(), std::make_pair(byte, INT32_MAX)), {byte, next});
            }
            node = next;
        }
        if (node && nodes[node].special < 0) { // of two with one text llama.cpp finds the first
            nodes[node].special = static_cast<int32_t>(index);
        }
    }
    std::fill(std::begin(roots), std::end(roots), 0);
    std::queue<int32_t> waiting;
    for (const auto &[byte, node] : nodes[0].next) {
        roots[byte] = node;
        waiting.push(node);
    }
    while (!waiting.empty()) {
        const int32_t node = waiting.front();
        waiting.pop();
        for (const auto &[byte, next] : nodes[node].next) {
            const int32_t fallback = step(nodes[node].fallback, byte);
            nodes[next].fallback = fallback;
            nodes[next].shorter = nodes[fallback].special >= 0 ? fallback : nodes[fallback].shorter;
            waiting.push(next);
        }
    }
}

int32_t Specials::child(int32_t node, uint8_t byte) const {
    const auto &edges = nodes[node].next;
    const auto found = std::lower_bound(edges.begin(), edges.end(), std::make_pair(byte, INT32_MIN));
    return found != edges.end() && found->first == byte ? found->second : -1;
}

int32_t Specials::step(int32_t node, uint8_t byte) const {
    while (node) {
        const int32_t next = child(node, byte);
        if (next >= 0) {
            return next;
        }
        node = nodes[node].fallback;
    }
    return roots[byte];
}

bool Specials::guarded(int32_t token, const SpecialRules &rules) const {
    if (rules.everywhere) {
        return false;
    }
    return (attributes[token] & control) || (!rules.markers.empty() && rules.markers[token]);
}

bool Specials::counts(const Special &special, uint32_t end, const SpecialRules &rules) const {
    if (!guarded(special.token, rules)) {
        return true;
    }
    const uint32_t begin = end - special.size;
    const auto after = std::upper_bound(rules.written.begin(), rules.written.end(), begin,
                                        [](uint32_t at, const Range &range) { return at < range.begin; });
    return after != rules.written.begin() && end <= std::prev(after)->end;
}

int32_t Specials::count(const char *text, size_t length, int32_t most) const {
    int32_t found = 0;
    int32_t node = 0;
    for (size_t at = 0; at < length && found < most; ++at) {
        node = step(node, static_cast<uint8_t>(text[at]));
        found += nodes[node].special >= 0 || nodes[node].shorter >= 0;
    }
    return found;
}

Partition Specials::partition(const char *text, uint32_t length, const SpecialRules &rules, const Stop &stop) const {
    Partition found;
    // A place that may hold a special token: the longest that ends there, by rank, and the node where it ends.  Of the
    // tokens that end at one place at most one is taken, so each place is in the queue once.
    struct Place {
        int32_t rank; // the first in llama.cpp's list comes first, and of one token the leftmost
        uint32_t end;
        int32_t node;
    };
    const auto later = [](const Place &a, const Place &b) { return a.rank != b.rank ? a.rank > b.rank : a.end > b.end; };
    std::vector<Place> places;

    int32_t node = 0;
    for (uint32_t at = 0; at < length; ++at) {
        if (at % between_looks == 0) {
            stop.look();
        }
        node = step(node, static_cast<uint8_t>(text[at]));
        int32_t first = -1;
        Refused refused{at + 1};
        for (int32_t here = nodes[node].special >= 0 ? node : nodes[node].shorter; here >= 0; here = nodes[here].shorter) {
            const Special &special = specials[nodes[here].special];
            if (counts(special, at + 1, rules)) {
                first = first < 0 ? here : first;
            } else {
                refused.begin = at + 1 - special.size;
                if (!(special.attributes & control)) {
                    refused.visible = refused.begin;
                }
            }
        }
        if (first >= 0) {
            places.push_back({nodes[first].special, at + 1, first});
        }
        if (refused.begin != Refused::none) {
            found.refused.push_back(refused);
        }
    }

    // 0: text.  A token that is taken is at least as long as those after it.  So two of them overlap only if the first or
    // the last byte of the later one is taken.
    std::vector<char> taken(places.empty() ? 0 : length);
    std::vector<Part> tokens;
    std::priority_queue<Place, std::vector<Place>, decltype(later)> queue(later, std::move(places));
    for (uint32_t step_count = 0; !queue.empty(); ++step_count) {
        if (step_count % between_looks == 0) {
            stop.look();
        }
        const Place place = queue.top();
        queue.pop();
        if (taken[place.end - 1]) {
            continue; // and so is the end of every shorter one
        }
        const Special &special = specials[place.rank];
        const uint32_t begin = place.end - special.size;
        if (taken[begin]) {
            int32_t here = nodes[place.node].shorter;
            while (here >= 0 && !counts(specials[nodes[here].special], place.end, rules)) {
                here = nodes[here].shorter;
            }
            if (here >= 0) {
                queue.push({nodes[here].special, place.end, here});
            }
            continue;
        }
        std::fill(taken.begin() + begin, taken.begin() + place.end, 1);
        tokens.push_back({{begin, place.end}, special.token});
        if (special.attributes & LLAMA_TOKEN_ATTR_LSTRIP) {
            for (uint32_t at = begin; at > 0 && !taken[at - 1] && is_space(text[at - 1]); --at) {
                taken[at - 1] = 1;
            }
        }
        if (special.attributes & LLAMA_TOKEN_ATTR_RSTRIP) {
            for (uint32_t at = place.end; at < length && !taken[at] && is_space(text[at]); ++at) {
                taken[at] = 1;
            }
        }
    }
    stop.look();
    std::sort(tokens.begin(), tokens.end(), [](const Part &a, const Part &b) { return a.range.begin < b.range.begin; });

    const auto add_text = [&](uint32_t begin, uint32_t end) {
        // Whitespace that a token took along is at the edges.
        while (begin < end && !taken.empty() && taken[begin]) {
            ++begin;
        }
        while (begin < end && !taken.empty() && taken[end - 1]) {
            --end;
        }
        if (begin < end) {
            found.parts.push_back({{begin, end}, -1});
        }
    };
    uint32_t at = 0;
    for (const Part &part : tokens) {
        add_text(at, part.range.begin);
        found.parts.push_back(part);
        at = part.range.end;
    }
    add_text(at, length);
    return found;
}

} // namespace laneway
