#include "rules.h"

#include "failure.h"

#include <algorithm>
#include <ctime>
#include <string>

namespace laneway {

namespace {

// Processor time of this thread.  The load of the machine does not count.
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
        // Each alternative has its own end, so following one never leads into another.
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

} // namespace laneway
