#include <ddpkit/train/csv.h>

#include "support/catch.h"

using ddpkit::train::csv_field;
using ddpkit::train::parse_csv;

TEST_CASE("CSV is read by RFC 4180", "[train]") {
  const auto records = parse_csv(
      "\xEF\xBB\xBF"
      "a,b\r\n\"x,1\",\"say \"\"hi\"\"\"\n\n\"two\nlines\",3\n,\nlast,\"\"");
  REQUIRE(records.size() == 5);
  CHECK(records[0].fields == std::vector<std::string>{"a", "b"});
  CHECK(records[1].fields == std::vector<std::string>{"x,1", "say \"hi\""});
  CHECK(records[2].fields == std::vector<std::string>{"two\nlines", "3"});
  CHECK(records[2].line == 4);
  CHECK(records[3].fields == std::vector<std::string>{"", ""});
  CHECK(records[3].line == 6);
  CHECK(records[4].fields == std::vector<std::string>{"last", ""});
  CHECK(parse_csv("a\n\"never,closed\n")[1].fault == "a quote is never closed");
  CHECK(parse_csv("\"a\"b,c")[0].fault == "there is text behind a closing quote");
  CHECK(parse_csv("").empty());
  for (const std::string text : {"plain", "with,comma", "with \"quotes\"", "two\nlines", ""})
    CHECK(parse_csv("x," + csv_field(text))[0].fields[1] == text);
}
