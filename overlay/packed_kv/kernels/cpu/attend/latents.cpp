// Decode attention over pages of latents, which are K and V at once for all query heads.
#include "latent_tile.h"

#include "decode.h"

EXPORT_DECODE(LatentTile)
