#include "fmt/format.h"

namespace fmt {
inline namespace v9 {
std::string format(const char* text, int number) { return std::to_string(number) + text; }
}  // namespace v9
}  // namespace fmt
