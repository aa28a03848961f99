#pragma once

#include "border.h"
#include "tokenizing.h"

struct laneway_model {
    llama_model *model;
    const llama_vocab *vocabulary;
    laneway::Tokenizing tokenizing;

    explicit laneway_model(llama_model *model)
        : model(model), vocabulary(llama_model_get_vocab(model)), tokenizing(model, vocabulary) {}
};
