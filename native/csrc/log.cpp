// llama.cpp's log.  Its callback may come on any thread and Python may not run there, so the lines wait in a ring until
// Python takes them.
#include "border.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstring>
#include <deque>
#include <mutex>

namespace {

struct Line {
    int32_t level;
    std::string text;
};

constexpr size_t capacity = 256;
std::mutex mutex;
std::deque<Line> lines;
std::atomic<int32_t> waiting{0};
std::atomic<int32_t> threshold{GGML_LOG_LEVEL_WARN};

thread_local std::string *first_error = nullptr;
thread_local int32_t last_level = 0;

void keep(int32_t level, const std::string &line, bool continued) {
    if (level < threshold.load(std::memory_order_relaxed)) {
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (continued && !lines.empty()) {
        lines.back().text += line;
        return;
    }
    if (lines.size() == capacity) {
        lines.pop_front(); // the newest lines tell why something failed
    }
    lines.push_back({level, line});
    waiting.store(static_cast<int32_t>(lines.size()), std::memory_order_relaxed);
}

void on_line(ggml_log_level level, const char *text, void *) {
    const bool continued = level == GGML_LOG_LEVEL_CONT;
    const int32_t effective = continued ? last_level : static_cast<int32_t>(level);
    last_level = effective;
    std::string line(text);
    while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) {
        line.pop_back();
    }
    // Progress dots and the like.
    if (line.find_first_not_of(". ") == std::string::npos) {
        return;
    }
    if (effective == GGML_LOG_LEVEL_ERROR && first_error && first_error->empty()) {
        *first_error = line;
    }
    keep(effective, line, continued);
}

std::once_flag started;

} // namespace

namespace laneway {

FirstError::FirstError() { first_error = new std::string; }

FirstError::~FirstError() {
    delete first_error;
    first_error = nullptr;
}

std::string FirstError::text(const char *otherwise) const { return first_error->empty() ? otherwise : *first_error; }

std::string without_speaker(const std::string &line) {
    const size_t end = line.find(": ");
    if (end == std::string::npos || line.find('_') >= end) {
        return line;
    }
    const bool is_name = std::all_of(line.begin(), line.begin() + static_cast<std::ptrdiff_t>(end), [](unsigned char c) {
        return std::isalnum(c) || c == '_';
    });
    return is_name ? line.substr(end + 2) : line;
}

} // namespace laneway

extern "C" {

void laneway_start(const char *folder) {
    std::call_once(started, [folder] {
        // Log setters are not thread-safe: this is the only call.
        llama_log_set(on_line, nullptr);
        if (ggml_backend_reg_count() == 0) {
            ggml_backend_load_all_from_path(folder);
        }
        llama_backend_init();
    });
}

const char *laneway_llama_version(void) { return llama_version(); }
const char *laneway_llama_commit(void) { return LANEWAY_LLAMA_COMMIT; }
int32_t laneway_has_gpu(void) { return llama_supports_gpu_offload(); }
const char *laneway_system_info(void) { return llama_print_system_info(); }

void laneway_log_level(int32_t level) { threshold.store(level, std::memory_order_relaxed); }

int32_t laneway_log_waiting(void) { return waiting.load(std::memory_order_relaxed); }

int32_t laneway_log_take(char *text, int32_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (lines.empty()) {
        return 0;
    }
    const Line line = std::move(lines.front());
    lines.pop_front();
    waiting.store(static_cast<int32_t>(lines.size()), std::memory_order_relaxed);
    std::snprintf(text, static_cast<size_t>(size), "%s", line.text.c_str());
    return line.level;
}

} // extern "C"
