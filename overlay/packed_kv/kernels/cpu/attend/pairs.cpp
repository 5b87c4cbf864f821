// Decode attention over pages of K and V.
#include "pair_tile.h"

#include "decode.h"

EXPORT_DECODE(PairTile)
