# Installs ddpkit's Debian package in a bare Debian, and builds and runs a project there that uses it.
FROM debian:bookworm-slim AS build
COPY . /ddpkit
WORKDIR /ddpkit
ENV DDPKIT_CMAKE_ARGS="-DDDPKIT_TESTS=OFF -DDDPKIT_EXAMPLES=OFF -DDDPKIT_BENCHMARKS=OFF -DDDPKIT_PYTHON=OFF"
RUN script/build && cd build && cpack -G DEB -B /package

FROM debian:bookworm-slim
COPY --from=build /package /package
# LibTorch comes in no package. The programs of ours load it from its path at build time.
COPY --from=build /ddpkit/.deps /ddpkit/.deps
RUN apt-get update && \
    apt-get install --yes --no-install-recommends /package/ddpkit_*.deb && \
    ddpkit --version
RUN apt-get install --yes --no-install-recommends g++ cmake make
COPY tests/package /project
RUN cmake -S /project/installed -B /outside -DLibTorch_ROOT=/ddpkit/.deps/torch && \
    cmake --build /outside
CMD ["ddpkit", "run", "-n", "2", "--", "/outside/outside", "2"]
