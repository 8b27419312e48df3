# An image with the trainer har and the ddpkit command:
#   docker build -t har .
#   docker run -v "$PWD/data:/data" -v "$PWD/runs:/runs" har \
#     ddpkit run -n 2 -- har --data /data/ucihar --save-dir /runs/har
# tests/fresh/run --dockerfile executes these steps without Docker.
FROM debian:bookworm-slim AS build
COPY . /ddpkit
WORKDIR /ddpkit
RUN script/bootstrap
RUN script/build default bin/har bin/ddpkit
# The programs, and the libraries of LibTorch that they load.
RUN mkdir /app && cp build/bin/har build/bin/ddpkit /app && \
    cp -L $(ldd build/bin/har | awk '$3 ~ /\.deps/ { print $3 }') /app

FROM debian:bookworm-slim
RUN apt-get update && \
    apt-get install --yes --no-install-recommends libyaml-cpp0.7 && \
    rm -rf /var/lib/apt/lists/*
COPY --from=build /app /app
ENV PATH=/app:$PATH LD_LIBRARY_PATH=/app
CMD ["har", "--help"]
