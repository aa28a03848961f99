#include "laneway.h"
