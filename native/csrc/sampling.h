// Picks one token from a row of logits.  Knows nothing of contexts and batches.
//
// The order of things is that of laneway.decoder.Sampling: bias, penalties, then the largest logit, or temperature,
// top_k, top_p, min_p and a draw.  Each cut keeps the likeliest candidates (the lowest id first among equals), so together
// they keep what the strictest keeps, and nothing is ever sorted.  The draw walks what is kept by id.
#pragma once

#include "laneway.h"
#include "llama.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace laneway {

// Carries a status over to the C border.
struct Failure : std::runtime_error {
    int32_t code;
    int32_t slot;
    Failure(int32_t code, const std::string &text, int32_t slot = -1)
        : std::runtime_error(text), code(code), slot(slot) {}
};

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
    std::vector<llama_token_data> tested; // by a grammar
    std::vector<float> numbers;
    std::vector<double> sums;
};

struct GrammarFree {
    void operator()(llama_sampler *grammar) const { llama_sampler_free(grammar); }
};

class Sampler {
public:
    // vocabulary may be null if there is no grammar.
    Sampler(const llama_vocab *vocabulary, const laneway_sampling &sampling, const int32_t *prompt, int32_t prompt_count);

    // Changes logits in place.  choice gets the log-probabilities that were asked for.
    int32_t pick(float *logits, int32_t count, Scratch &scratch, laneway_choice *choice);

    bool wants_logprobs() const { return logprobs; }

private:
    struct Seen {
        int32_t token;
        int32_t answered; // times in the answer; in the prompt alone: 0
    };

    void adjust(float *logits, int32_t count) const;
    int32_t choose(const float *logits, int32_t count, Scratch &scratch);
    int32_t choose_allowed(const float *logits, int32_t count, Scratch &scratch);
    int32_t draw(Scratch &scratch, float largest, double total);
    bool allows(int32_t token) const;
    void accept(int32_t token);
    int32_t end_token(int32_t count) const;
    void see(int32_t token, int32_t answered);

    const llama_vocab *vocabulary;
    double temperature, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty;
    int32_t top_k;
    bool logprobs;
    int32_t top_logprobs;
    std::vector<std::pair<int32_t, float>> bias;
    std::vector<Seen> seen;
    std::unordered_map<int32_t, size_t> seen_at;
    bool counting;
    std::unique_ptr<llama_sampler, GrammarFree> grammar;
    bool grammar_ended = false; // or could not be followed any further
    Random random;
};

} // namespace laneway
