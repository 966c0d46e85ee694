# kvd with Mooncake Store's client, for `tier = mooncake:…`; the same image runs Mooncake's master
# and stores. Built from the root of the repository, after docker/Dockerfile:
# docker build -f docker/mooncake.Dockerfile -t kvd-mooncake:0.1.0 .
ARG KVD=kvd:0.1.0
ARG PYTHON=python:3.11-slim-bookworm

FROM ${KVD} AS kvd

FROM ${PYTHON} AS build
COPY --from=kvd /opt/kvd /opt/kvd
COPY constraints.txt /tmp/constraints.txt
RUN python -m pip --python /opt/kvd/bin/python install --no-cache-dir \
    --constraint /tmp/constraints.txt mooncake-transfer-engine-non-cuda==0.3.13.post1

FROM ${KVD}
USER 0:0
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    libcurl4=7.88.* libibverbs1=44.* librdmacm1=44.* libnuma1=2.0.* \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/kvd /opt/kvd
USER 9330:9330
