// Decode attention over pages of latents, which are K and V at once for all query heads.
#include "latent_amx_tile.h"
#include "latent_tile.h"

#include "decode.h"

#ifdef HAS_AMX
EXPORT_DECODE(LatentAmxTile)
#else
EXPORT_DECODE(LatentTile)
#endif
