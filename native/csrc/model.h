#pragma once

#include "border.h"
#include "pieces.h"

struct laneway_model {
    llama_model *model;
    const llama_vocab *vocabulary;
    const laneway::Pieces pieces;
};
