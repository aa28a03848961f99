#pragma once

#include "border.h"
#include "pieces.h"
#include "tokenizing.h"

struct laneway_model {
    llama_model *model;
    const llama_vocab *vocabulary;
    laneway::Tokenizing tokenizing;
    const laneway::Pieces pieces;

    explicit laneway_model(llama_model *model)
        : model(model), vocabulary(llama_model_get_vocab(model)), tokenizing(model, vocabulary), pieces(vocabulary) {}
};
