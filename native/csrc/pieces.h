// The bytes that each token of a vocabulary stands for in an answer, read once when the model is loaded.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace laneway {

class Pieces {
public:
    explicit Pieces(const llama_vocab *vocabulary);

    int32_t count() const { return static_cast<int32_t>(ends.size()); }
    // Empty for control tokens: nothing of them is in the text.
    std::string_view operator[](int32_t token) const {
        return {bytes.data() + first[token], static_cast<size_t>(first[token + 1] - first[token])};
    }
    // Whether a token ends an answer.
    bool is_end(int32_t token) const { return token >= 0 && token < count() && ends[token]; }
    // Its place among all tokens in the order of their bytes.  Tokens that begin alike stand together.
    int32_t rank(int32_t token) const { return ranks[token]; }
    int32_t at_rank(int32_t place) const { return order[place]; }

private:
    std::vector<char> bytes;
    std::vector<uint32_t> first;
    std::vector<uint8_t> ends;
    std::vector<int32_t> order;
    std::vector<int32_t> ranks;
};

} // namespace laneway
