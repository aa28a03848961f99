#pragma once

#include "border.h"
#include "tokenizing.h"

#include <memory>
#include <mutex>

struct laneway_model {
    llama_model *model;
    const llama_vocab *vocabulary;
    // Made when the first text is tokenised.
    mutable std::once_flag made;
    mutable std::unique_ptr<laneway::Tokenizing> tables;

    const laneway::Tokenizing &tokenizing() const;
};
