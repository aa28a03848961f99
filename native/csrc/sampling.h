// Picks one token from a row of logits.  Knows nothing of contexts and batches.
//
// The order of things is that of laneway.decoder.Sampling: bias, penalties, then the largest logit, or temperature,
// top_k, top_p, min_p and a draw.  Each cut keeps the likeliest candidates (the lowest id first among equals), so together
// they keep what the strictest keeps, and nothing is ever sorted.  The draw walks what is kept by id.
#pragma once

#include "failure.h"
#include "grammar.h"
#include "laneway.h"

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace laneway {

// xoshiro256++ (Blackman and Vigna, arXiv:1805.01407), its state filled from the seed by splitmix64.
class Random {
public:
    explicit Random(uint64_t seed);
    // Uniform in [0, 1), 53 bits.
    double next();

private:
    uint64_t state[4];
};

// The blocks of a row: the largest logit of each, so that later passes visit few of them.
struct Survey {
    static constexpr int block = 256;
    std::vector<float> largest; // of each block
    float max;                  // -inf: every token is forbidden
    int32_t first;              // the lowest id among the largest

    // Throws LANEWAY_BAD_LOGITS for NaN and +inf.
    void run(const float *logits, int32_t count);
};

struct Candidate {
    int32_t id;
    float logit;
    double weight; // exp((logit - largest) / temperature)
};

// Buffers that all samplers of one thread share.
struct Scratch {
    Survey survey;
    std::vector<Candidate> candidates;
    std::vector<Candidate> kept;
    std::vector<float> numbers;
    std::vector<double> sums;
};

class Sampler {
public:
    // pieces may be null if there is no grammar; then no token is known to end an answer.
    Sampler(const Pieces *pieces, const laneway_sampling &sampling, const int32_t *prompt, int32_t prompt_count);

    // Changes logits in place.  choice gets the log-probabilities that were asked for.
    // Throws LANEWAY_NO_TOKEN if nothing may come next, and LANEWAY_GRAMMAR_LIMIT if the grammar cannot be followed in
    // time: both concern this sequence alone.
    int32_t pick(float *logits, int32_t count, Scratch &scratch, laneway_choice *choice);

    // Whether grammar and bias together allow a first token.
    bool begins(int32_t count);

    bool wants_logprobs() const { return logprobs; }
    // What following the grammar has cost since the last pick began.
    int64_t grammar_work() const { return grammar ? grammar->budget.work() : 0; }

private:
    struct Seen {
        int32_t token;
        int32_t answered; // times in the answer; in the prompt alone: 0
    };

    void adjust(float *logits, int32_t count) const;
    int32_t choose(const float *logits, int32_t count, Scratch &scratch);
    int32_t choose_allowed(const float *logits, int32_t count, Scratch &scratch);
    int32_t draw(Scratch &scratch, float largest, double total);
    void see(int32_t token, int32_t answered);

    const Pieces *pieces;
    double temperature, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty;
    int32_t top_k;
    bool logprobs;
    int32_t top_logprobs;
    std::vector<std::pair<int32_t, float>> bias;
    std::vector<Seen> seen;
    std::unordered_map<int32_t, size_t> seen_at;
    bool counting;
    std::unique_ptr<Grammar> grammar;
    int32_t ended = -1; // the end token that ended an answer of the grammar
    Random random;
};

} // namespace laneway
