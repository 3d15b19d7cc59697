// call_sites.h: where in the user's program each call was written, for error messages.
#pragma once

#include <string>

namespace jax_ring {

// Kept outside the program: an attribute that differs between equal calls would keep the compiler from merging them.

// Records that `call` (its description, as in the custom call's attribute) was written at `site`.
void note_call_site(const std::string& call, const std::string& site);

// ", called at a or b" for the sites recorded for this call; empty if there are none.
std::string called_at(const std::string& call);

}  // namespace jax_ring
