#include "border.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

// A wheel for any x86-64 gets these loops three times and picks at load time; a build for this machine needs no choice.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__AVX512F__) && !defined(LANEWAY_ONE_VARIANT)
#define LANEWAY_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LANEWAY_CLONES
#endif

namespace laneway {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// ---- loops over whole rows, written so that compilers vectorise them without relaxed floating point

inline int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// An integer that sorts as the float does; NaNs lie beyond both infinities.  Its own inverse.
inline int32_t sortable(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

constexpr int32_t key_of_infinity = 0x7f800000;
constexpr int32_t key_of_minus_infinity = static_cast<int32_t>(0x807fffff);

LANEWAY_CLONES void range_of(const float *values, int32_t count, int32_t *low, int32_t *high) {
    int32_t smallest = std::numeric_limits<int32_t>::max();
    int32_t largest = std::numeric_limits<int32_t>::min();
    for (int32_t i = 0; i < count; ++i) {
        const int32_t key = sortable(bits_of(values[i]));
        smallest = key < smallest ? key : smallest;
        largest = key > largest ? key : largest;
    }
    *low = smallest;
    *high = largest;
}

// e to the power of a number that is not above 0: within 2 units in the last place, 0 below -87.
inline float exp_of(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const float rounder = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const float shifted = clamped * 1.44269504f + rounder;
    const float power = shifted - rounder;
    const float rest = (clamped - power * 0.693359375f) + power * 2.12194440e-4f;
    float sum = 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const uint32_t scaled = static_cast<uint32_t>(bits_of(sum)) + (static_cast<uint32_t>(bits_of(shifted)) << 23);
    return x < -87.0f ? 0.0f : float_of(static_cast<int32_t>(scaled));
}

// out[i] = exp((values[i] - max) * scale)
LANEWAY_CLONES void exp_row(const float *values, int32_t count, float max, float scale, float *out) {
    for (int32_t i = 0; i < count; ++i) {
        out[i] = exp_of((values[i] - max) * scale);
    }
}

LANEWAY_CLONES double sum_of(const float *values, int32_t count) {
    constexpr int32_t lanes = 16;
    float partial[lanes] = {};
    int32_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        for (int32_t lane = 0; lane < lanes; ++lane) {
            partial[lane] += values[i + lane];
        }
    }
    double sum = 0;
    for (float lane : partial) {
        sum += lane;
    }
    for (; i < count; ++i) {
        sum += values[i];
    }
    return sum;
}

// Sums of exp((logit - max) * scale) over each block of the survey, and over all.
double exp_sums(const float *logits, int32_t count, float max, float scale, std::vector<double> *sums) {
    float row[Survey::block];
    double total = 0;
    if (sums) {
        sums->clear();
    }
    for (int32_t start = 0; start < count; start += Survey::block) {
        const int32_t length = std::min<int32_t>(Survey::block, count - start);
        exp_row(logits + start, length, max, scale, row);
        const double sum = sum_of(row, length);
        total += sum;
        if (sums) {
            sums->push_back(sum);
        }
    }
    return total;
}

// Thresholds below the largest logit, in units of the temperature, that tell how far down top_p may have to look.
constexpr int32_t depths = 8;
constexpr float depth_step = 1.5f;

// above[d] += the part of the sum of the row that lies no lower than (d + 1) * depth_step
LANEWAY_CLONES void add_above(const float *row, int32_t count, const float *least, float *above) {
    for (int32_t depth = 0; depth < depths; ++depth) {
        constexpr int32_t lanes = 16;
        float partial[lanes] = {};
        for (int32_t i = 0; i + lanes <= count; i += lanes) {
            for (int32_t lane = 0; lane < lanes; ++lane) {
                partial[lane] += row[i + lane] >= least[depth] ? row[i + lane] : 0.0f;
            }
        }
        for (float lane : partial) {
            above[depth] += lane;
        }
    }
}

// The sum of exp((logit - max) * scale) over all, and over those above each depth.
double exp_sums_above(const float *logits, int32_t count, float max, float scale, double *above) {
    float least[depths];
    for (int32_t depth = 0; depth < depths; ++depth) {
        least[depth] = exp_of(-static_cast<float>(depth + 1) * depth_step);
        above[depth] = 0;
    }
    float row[Survey::block];
    double total = 0;
    for (int32_t start = 0; start < count; start += Survey::block) {
        const int32_t length = std::min<int32_t>(Survey::block, count - start);
        exp_row(logits + start, length, max, scale, row);
        std::fill(row + length, row + Survey::block, 0.0f);
        float block[depths] = {};
        add_above(row, Survey::block, least, block);
        for (int32_t depth = 0; depth < depths; ++depth) {
            above[depth] += block[depth];
        }
        total += sum_of(row, Survey::block);
    }
    return total;
}

// ---- candidates

bool before(const Candidate &a, const Candidate &b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// All tokens whose logit is at least `floor`; never forbidden ones.
void collect(const float *logits, int32_t count, const Survey &survey, float floor, std::vector<Candidate> &out) {
    floor = std::max(floor, -FLT_MAX);
    out.clear();
    for (size_t block = 0; block < survey.largest.size(); ++block) {
        if (survey.largest[block] < floor) {
            continue;
        }
        const int32_t start = static_cast<int32_t>(block) * Survey::block;
        const int32_t end = std::min<int32_t>(start + Survey::block, count);
        for (int32_t id = start; id < end; ++id) {
            if (logits[id] >= floor) {
                out.push_back({id, logits[id], 0});
            }
        }
    }
}

// At least the `wanted` most likely tokens, by id; fewer only if the others are forbidden.
void collect_top(const float *logits, int32_t count, size_t wanted, Scratch &scratch) {
    const Survey &survey = scratch.survey;
    float floor = -infinity;
    if (wanted < survey.largest.size()) {
        // So many blocks have a token at least that likely, hence so many tokens do.
        scratch.numbers = survey.largest;
        const auto kth = scratch.numbers.begin() + static_cast<std::ptrdiff_t>(wanted) - 1;
        std::nth_element(scratch.numbers.begin(), kth, scratch.numbers.end(), std::greater<float>());
        floor = *kth;
    }
    collect(logits, count, survey, floor, scratch.candidates);
}

// Keeps the `wanted` most likely, in no order.
void cut(std::vector<Candidate> &items, size_t wanted) {
    if (items.size() > wanted) {
        std::nth_element(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(wanted) - 1, items.end(), before);
        items.resize(wanted);
    }
}

// An extreme bias or penalty must not look like a broken model, and a broken model must not look like an extreme bias.
float adjusted(float before, double after) {
    if (!std::isfinite(before) || after == -std::numeric_limits<double>::infinity()) {
        return std::isfinite(before) ? -infinity : before;
    }
    return static_cast<float>(std::clamp<double>(after, -FLT_MAX, FLT_MAX));
}

uint64_t rotated(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

} // namespace

Random::Random(uint64_t seed) {
    for (uint64_t &word : state) {
        seed += 0x9e3779b97f4a7c15ULL;
        uint64_t z = seed;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        word = z ^ (z >> 31);
    }
}

double Random::next() {
    const uint64_t result = rotated(state[0] + state[3], 23) + state[0];
    const uint64_t t = state[1] << 17;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= t;
    state[3] = rotated(state[3], 45);
    return static_cast<double>(result >> 11) * 0x1.0p-53;
}

void Survey::run(const float *logits, int32_t count) {
    const int32_t blocks = (count + block - 1) / block;
    largest.resize(static_cast<size_t>(blocks));
    int32_t low = std::numeric_limits<int32_t>::max();
    int32_t high = std::numeric_limits<int32_t>::min();
    int32_t best = 0;
    max = -infinity;
    for (int32_t b = 0; b < blocks; ++b) {
        const int32_t start = b * block;
        int32_t block_low, block_high;
        range_of(logits + start, std::min<int32_t>(block, count - start), &block_low, &block_high);
        low = std::min(low, block_low);
        high = std::max(high, block_high);
        const float value = float_of(sortable(block_high));
        largest[static_cast<size_t>(b)] = value;
        if (value > max) { // as floats, so that -0 and 0 are equal and the earlier block stays
            max = value;
            best = b;
        }
    }
    if (low < key_of_minus_infinity || high >= key_of_infinity) {
        throw Failure(LANEWAY_BAD_LOGITS, "the model computed logits that are not numbers (NaN or +inf); its weights or an "
                                          "adapter are damaged, or F16 overflowed");
    }
    first = best * block;
    while (first < count - 1 && logits[first] != max) {
        ++first;
    }
}

Sampler::Sampler(const Pieces *pieces, const laneway_sampling &sampling, const int32_t *prompt, int32_t prompt_count)
    : pieces(pieces), temperature(sampling.temperature), top_p(sampling.top_p), min_p(sampling.min_p),
      repeat_penalty(sampling.repeat_penalty), frequency_penalty(sampling.frequency_penalty),
      presence_penalty(sampling.presence_penalty), top_k(sampling.top_k), logprobs(sampling.logprobs != 0),
      top_logprobs(std::min<int32_t>(sampling.top_logprobs, LANEWAY_TOP_LOGPROBS)), random(sampling.seed) {
    for (int32_t i = 0; i < sampling.bias_count; ++i) {
        bias.emplace_back(sampling.bias_tokens[i], sampling.bias_values[i]);
    }
    counting = repeat_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0;
    if (repeat_penalty != 1.0) {
        for (int32_t i = 0; i < prompt_count; ++i) {
            see(prompt[i], 0);
        }
    }
    if (sampling.grammar) {
        if (!pieces) {
            throw Failure(LANEWAY_BAD_ARGUMENT, "a grammar needs a model's vocabulary");
        }
        grammar = std::make_unique<Grammar>(*pieces, *sampling.grammar);
    }
}

void Sampler::see(int32_t token, int32_t answered) {
    // A chat's prompt is full of end tokens: penalties on them would only keep the answer from its end.
    if (pieces && pieces->is_end(token)) {
        return;
    }
    const auto [place, is_new] = seen_at.try_emplace(token, seen.size());
    if (is_new) {
        seen.push_back({token, answered});
    } else {
        seen[place->second].answered += answered;
    }
}

void Sampler::adjust(float *logits, int32_t count) const {
    for (const auto &[token, value] : bias) {
        if (token >= 0 && token < count) {
            logits[token] = adjusted(logits[token], static_cast<double>(logits[token]) + value);
        }
    }
    for (const Seen &entry : seen) {
        if (entry.token < 0 || entry.token >= count) {
            continue;
        }
        double logit = logits[entry.token];
        logit = logit > 0 ? logit / repeat_penalty : logit * repeat_penalty;
        if (entry.answered > 0) {
            logit -= frequency_penalty * entry.answered + presence_penalty;
        }
        logits[entry.token] = adjusted(logits[entry.token], logit);
    }
}

// Cuts scratch.candidates, which lie by id, and draws one of what is left, walking it by id.
// They hold all that top_k keeps if top_k cuts, else all that min_p keeps, else the likeliest with top_p's share at least.
// total: the mass that top_p is a share of, in units of exp((logit - largest) / temperature); below 0: the candidates'.
int32_t Sampler::draw(Scratch &scratch, float largest, double total) {
    std::vector<Candidate> &candidates = scratch.candidates;
    std::vector<Candidate> &kept = scratch.kept;
    for (Candidate &candidate : candidates) {
        candidate.weight = std::exp((static_cast<double>(candidate.logit) - largest) / temperature);
    }
    const auto mass = [](auto begin, auto end) {
        double sum = 0;
        for (; begin != end; ++begin) {
            sum += begin->weight;
        }
        return sum;
    };
    // All three cuts keep the likeliest; so the least likely token that is kept says which others are.
    kept = candidates;
    if (top_k > 0) {
        cut(kept, static_cast<size_t>(top_k));
    }
    const double share = top_p < 1 ? top_p * (total < 0 ? mass(kept.begin(), kept.end()) : total) : 0;
    if (min_p > 0) {
        kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const auto &item) { return item.weight < min_p; }),
                   kept.end());
    }
    if (top_p < 1) {
        // Halve the part where the sum of the likeliest first reaches the share, until one token is left.
        double before_part = 0;
        auto begin = kept.begin(), end = kept.end();
        while (end - begin > 1) {
            const auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end, before);
            const double upper = mass(begin, middle);
            if (before_part + upper >= share) {
                end = middle;
            } else {
                before_part += upper;
                begin = middle;
            }
        }
        kept.erase(end, kept.end());
    }
    const Candidate last = *std::max_element(kept.begin(), kept.end(), before);
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(), [&](const auto &item) { return before(last, item); }),
                     candidates.end());

    const double target = random.next() * mass(candidates.begin(), candidates.end());
    double sum = 0;
    for (const Candidate &candidate : candidates) {
        sum += candidate.weight;
        if (target < sum) {
            return candidate.id;
        }
    }
    return candidates.back().id;
}

int32_t Sampler::choose(const float *logits, int32_t count, Scratch &scratch) {
    const Survey &survey = scratch.survey;
    if (survey.max == -infinity) {
        return -1;
    }
    if (temperature == 0) {
        return survey.first;
    }
    if (top_k > 0 && top_k < count) {
        collect_top(logits, count, static_cast<size_t>(top_k), scratch);
        return draw(scratch, survey.max, -1);
    }
    const float scale = static_cast<float>(std::min<double>(1 / temperature, FLT_MAX));
    if (top_p < 1 || min_p > 0) {
        double floor = min_p > 0 ? survey.max + temperature * std::log(min_p) : -FLT_MAX;
        double total = 0;
        if (top_p < 1) {
            double above[depths];
            total = exp_sums_above(logits, count, survey.max, scale, above);
            for (int32_t depth = 0; depth < depths; ++depth) {
                if (above[depth] > top_p * total * (1 + 1e-4)) {
                    floor = std::max(floor, survey.max - temperature * (depth + 1) * depth_step);
                    break;
                }
            }
        }
        // A little lower than the border: that is drawn in double precision later.  There exp makes 1 of a difference that
        // is far smaller than the temperature, also where both logits are nearly 0.
        const double margin = 1e-6 * (std::abs(floor) + std::abs(survey.max) + temperature);
        collect(logits, count, survey, static_cast<float>(std::max<double>(floor - margin, -FLT_MAX)), scratch.candidates);
        return draw(scratch, survey.max, total);
    }
    // Nothing is cut: find the block that the draw falls into, then the token.
    double target = random.next() * exp_sums(logits, count, survey.max, scale, &scratch.sums);
    size_t block = 0;
    while (block + 1 < scratch.sums.size() && target >= scratch.sums[block]) {
        target -= scratch.sums[block++];
    }
    float row[Survey::block];
    const int32_t start = static_cast<int32_t>(block) * Survey::block;
    const int32_t length = std::min<int32_t>(Survey::block, count - start);
    exp_row(logits + start, length, survey.max, scale, row);
    int32_t last = -1; // rounding may leave a little of the target: the last possible token takes it
    for (int32_t i = 0; i < length; ++i) {
        if (row[i] > 0) {
            last = start + i;
            target -= row[i];
            if (target < 0) {
                break;
            }
        }
    }
    return last >= 0 ? last : survey.first;
}

// The grammar has refused what was picked: pick again among what it allows.  Testing the whole vocabulary is slow, so
// the likeliest tokens are tested first, and no more than are needed.
int32_t Sampler::choose_allowed(const float *logits, int32_t count, Scratch &scratch) {
    const bool greedy = temperature == 0;
    const size_t wanted = greedy ? 1 : top_k > 0 && top_k < count ? static_cast<size_t>(top_k) : static_cast<size_t>(count);
    // What min_p is going to cut need not be tested.  (top_p is a share of everything, so everything must be.)
    const bool cuts = !greedy && min_p > 0 && top_p >= 1;
    std::vector<Candidate> &candidates = scratch.candidates;
    for (size_t tested = std::max<size_t>(64, 4 * std::min<size_t>(wanted, cuts ? 1024 : wanted));; tested *= 16) {
        const bool all = tested >= static_cast<size_t>(count);
        collect_top(logits, count, std::min(tested, static_cast<size_t>(count)), scratch);
        if (candidates.size() > 2 * tested) {
            cut(candidates, tested);
            std::sort(candidates.begin(), candidates.end(), [](const auto &a, const auto &b) { return a.id < b.id; });
        }
        const float least = candidates.empty() ? -infinity : std::max_element(candidates.begin(), candidates.end(), before)->logit;
        grammar->filter(candidates);
        if (candidates.empty()) {
            if (all) {
                return -1;
            }
            continue;
        }
        const Candidate &first = *std::min_element(candidates.begin(), candidates.end(), before);
        // Those that were not tested are no likelier than the least likely one that was.  So min_p may cut all of them.
        const bool rest_is_cut = cuts && least < first.logit + temperature * std::log(min_p);
        if (candidates.size() < wanted && !all && !rest_is_cut) {
            continue;
        }
        return greedy ? first.id : draw(scratch, first.logit, -1);
    }
}

bool Sampler::begins(int32_t count) {
    std::vector<uint8_t> forbidden(static_cast<size_t>(count));
    for (const auto &[token, value] : bias) {
        if (token >= 0 && token < count) {
            forbidden[static_cast<size_t>(token)] = value == -infinity;
        }
    }
    if (grammar) {
        return grammar->begins(forbidden);
    }
    return std::find(forbidden.begin(), forbidden.end(), 0) != forbidden.end();
}

int32_t Sampler::pick(float *logits, int32_t count, Scratch &scratch, laneway_choice *choice) {
    double log_sum = 0;
    std::vector<std::pair<int32_t, float>> raw; // what adjust() is going to change
    if (logprobs) {
        // Of the model's own distribution, so before anything is adjusted.
        scratch.survey.run(logits, count);
        const float max = scratch.survey.max;
        if (max == -infinity) {
            throw Failure(LANEWAY_BAD_LOGITS, "the model gave every token a probability of 0");
        }
        log_sum = max + std::log(exp_sums(logits, count, max, 1.0f, nullptr));
        choice->top_count = 0;
        if (top_logprobs > 0) {
            collect_top(logits, count, static_cast<size_t>(top_logprobs), scratch);
            cut(scratch.candidates, static_cast<size_t>(top_logprobs));
            std::sort(scratch.candidates.begin(), scratch.candidates.end(), before);
            for (const Candidate &candidate : scratch.candidates) {
                choice->top_tokens[choice->top_count] = candidate.id;
                choice->top_logprobs[choice->top_count++] = static_cast<float>(candidate.logit - log_sum);
            }
        }
        for (const auto &[token, value] : bias) {
            if (token >= 0 && token < count) {
                raw.emplace_back(token, logits[token]);
            }
        }
        for (const Seen &entry : seen) {
            if (entry.token >= 0 && entry.token < count) {
                raw.emplace_back(entry.token, logits[entry.token]);
            }
        }
    }

    adjust(logits, count);
    int32_t token = ended;
    if (token < 0) {
        scratch.survey.run(logits, count);
        token = choose(logits, count, scratch);
        if (grammar && token >= 0) {
            grammar->budget.begin();
            if (!grammar->allows(token)) {
                token = choose_allowed(logits, count, scratch);
            }
        }
        if (token < 0) {
            throw Failure(LANEWAY_NO_TOKEN,
                          grammar ? "no token may come next: what the grammar allows here, the vocabulary does not have or "
                                    "logit_bias forbids"
                                  : "no token may come next: logit_bias or the model forbids every one");
        }
        if (grammar && pieces->is_end(token)) {
            ended = token;
        } else if (grammar) {
            grammar->accept(token);
        }
        if (counting) {
            see(token, 1);
        }
    }

    if (logprobs) {
        float logit = logits[token];
        for (const auto &[id, value] : raw) {
            if (id == token) {
                logit = value;
                break;
            }
        }
        choice->token = token;
        choice->logprob = static_cast<float>(logit - log_sum);
    }
    return token;
}

} // namespace laneway
