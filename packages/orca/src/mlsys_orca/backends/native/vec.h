// The width of panels.
#pragma once

#include <mlsys/math.h>

namespace orca {

using namespace mlsys;

constexpr int PANEL = 16;  // columns of a packed weight, and slots of a block of keys: both are read side by side
MLSYS_CONSTANTS(PANEL);
constexpr int VECS = PANEL / LANES;

}  // namespace orca
