// CGT_DEBUG is 0 unless the build says otherwise (setup.py): `if CGT_DEBUG:` then vanishes from a
// release build. In a debug build arrays move on every growth, freed rows are filled with a
// pattern, and table_check() runs after every change of the table.
#pragma once
#ifndef CGT_DEBUG
#define CGT_DEBUG 0
#endif
#ifndef CGT_WITH_CUDA
#define CGT_WITH_CUDA 0
#endif
#ifndef CGT_TORCH_MINOR
#define CGT_TORCH_MINOR 11
#endif
