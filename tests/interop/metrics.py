"""Collects metrics like Prometheus and parses them with its own library.

    metrics.py HOST:PORT    prints one line per sample: the type of the family, name, sorted labels, value
"""

import sys
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def main(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4"), answer.headers
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        assert family.documentation, family
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            print(family.type, sample.name, f"{{{labels}}}", sample.value)


main(*sys.argv[1:])
