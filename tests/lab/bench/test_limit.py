from forewarn.lab.bench.limit import visits


def test_every_visit_takes_time():
    found = visits([60_000, 0, 40_000])
    assert 0 < found.read < 1
    assert 0 < found.rows < 1
    assert 0 < found.histograms < 1
