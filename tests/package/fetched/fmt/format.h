// Imitates another version of fmt, with the function that main.cpp calls.
#pragma once

#include <string>

#ifdef FMT_HEADER_ONLY
#error "ddpkit's targets make the fmt of other projects header-only"
#endif

namespace fmt {
inline namespace v9 {
std::string format(const char* text, int number);
}
}  // namespace fmt
