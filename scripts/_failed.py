"""The names of the tests that failed, from pytest's reports in XML: a line each, with the reason."""

import sys
from xml.etree import ElementTree

for report in sys.argv[1:]:
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in ("failure", "error"):
            for found in case.findall(outcome):
                words = (found.get("message") or "").partition("\n")[0]
                print("FAILED", f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')} - {words}"[:200])
