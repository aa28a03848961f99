#pragma once

#include "border.h"

struct laneway_model {
    llama_model *model;
    const llama_vocab *vocabulary;
};
