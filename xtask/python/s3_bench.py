"""Speed of boto3 over the server of S3 at AWS_ENDPOINT_URL, for `cargo xtask bench remote`.

Arguments: bucket, length of a value, number of values. Prints a line of JSON.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.config import Config

# As many requests at a time as lmc has.
THREADS = 32


def main() -> None:
    bucket, length, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = Config(max_pool_connections=THREADS)
    client = boto3.client("s3", region_name="us-east-1", config=config)
    value = bytes(range(256)) * (length // 256)

    def put(number: int) -> None:
        client.put_object(Bucket=bucket, Key=f"boto3/{number}", Body=value)

    def get(number: int) -> None:
        found = client.get_object(Bucket=bucket, Key=f"boto3/{number}")["Body"].read()
        if len(found) != length:
            raise SystemExit(f"value {number} has {len(found)} bytes")

    figures = {}
    with ThreadPoolExecutor(THREADS) as threads:
        for name, one in [("put_gb_per_s", put), ("get_gb_per_s", get)]:
            begun = time.perf_counter()
            for _ in threads.map(one, range(count)):
                pass
            figures[name] = length * count / (time.perf_counter() - begun) / 1e9
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
