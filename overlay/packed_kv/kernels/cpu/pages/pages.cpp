// What writes the pages of a layout and what reads them: store.py, gather.py, latent_pages.py.
#include "gather.h"
#include "store.h"

EXPORT long pk_store_bytes() { return sizeof(Layer) + sizeof(Store); }
EXPORT long pk_gather_bytes() { return sizeof(Layer) + sizeof(Gather); }
