"""The names of the tests that failed, from pytest's reports in XML: a line each, with the reason."""

import sys
from xml.etree import ElementTree

for report in sys.argv[1:]:
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in ("failure", "error"):
            for found in case.findall(outcome):
                words = (found.get("message") or "").partition("\n")[0]
                module, _, of_class = case.get("classname", "").partition(".Test")
                test = f"Test{of_class}::{case.get('name')}" if of_class else case.get("name")
                print("FAILED", f"{module.replace('.', '/')}.py::{test} - {words}"[:200])
