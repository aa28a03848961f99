#include "pieces.h"

#include <algorithm>

namespace laneway {

namespace {

// The first eight bytes as a number that sorts as they do.
uint64_t head_of(std::string_view piece) {
    uint64_t head = 0;
    for (size_t i = 0; i < 8; ++i) {
        head = (head << 8) | (i < piece.size() ? static_cast<uint8_t>(piece[i]) : 0);
    }
    return head;
}

} // namespace

Pieces::Pieces(const llama_vocab *vocabulary) {
    const int32_t count = llama_vocab_n_tokens(vocabulary);
    first.reserve(static_cast<size_t>(count) + 1);
    first.push_back(0);
    ends.resize(static_cast<size_t>(count));
    std::vector<char> room(256);
    for (int32_t token = 0; token < count; ++token) {
        int32_t length = llama_token_to_piece(vocabulary, token, room.data(), static_cast<int32_t>(room.size()), 0, false);
        if (length < 0) {
            room.resize(static_cast<size_t>(-length));
            length = llama_token_to_piece(vocabulary, token, room.data(), static_cast<int32_t>(room.size()), 0, false);
        }
        bytes.insert(bytes.end(), room.begin(), room.begin() + std::max(0, length));
        first.push_back(static_cast<uint32_t>(bytes.size()));
        ends[static_cast<size_t>(token)] = llama_vocab_is_eog(vocabulary, token);
    }
    struct Entry {
        uint64_t head;
        int32_t token;
    };
    std::vector<Entry> entries;
    entries.reserve(static_cast<size_t>(count));
    for (int32_t token = 0; token < count; ++token) {
        entries.push_back({head_of((*this)[token]), token});
    }
    std::sort(entries.begin(), entries.end(), [this](const Entry &a, const Entry &b) {
        if (a.head != b.head) {
            return a.head < b.head;
        }
        const int order = (*this)[a.token].compare((*this)[b.token]);
        return order != 0 ? order < 0 : a.token < b.token;
    });
    ranks.resize(static_cast<size_t>(count));
    order.reserve(static_cast<size_t>(count));
    for (const Entry &entry : entries) {
        ranks[static_cast<size_t>(entry.token)] = static_cast<int32_t>(order.size());
        order.push_back(entry.token);
    }
}

} // namespace laneway
