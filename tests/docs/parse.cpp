// parse yaml|json FILE...: checks the syntax of each file. Prints one line to stderr per invalid file.
#include <yaml-cpp/yaml.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

int main(int argc, char** argv) {
  int status = argc > 2 ? 0 : 2;
  for (int i = 2; i < argc; ++i) {
    try {
      std::ifstream file(argv[i]);
      if (!file) throw std::runtime_error("cannot be opened");
      if (std::string(argv[1]) == "yaml") {
        if (YAML::LoadAll(file).empty()) throw std::runtime_error("holds nothing");
      } else {
        if (nlohmann::json::parse(file).is_discarded()) throw std::runtime_error("is no JSON");
      }
    } catch (const std::exception& error) {
      std::cerr << argv[i] << ": " << error.what() << '\n';
      status = 1;
    }
  }
  return status;
}
