#include "grammar.h"

#include "sampling.h"

#include <algorithm>
#include <numeric>

namespace laneway {

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
