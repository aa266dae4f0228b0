// Numbers as people read them.

import assert from "node:assert/strict";
import test from "node:test";

import { address } from "../../api/static/core/api.js";
import {
  bytes,
  count,
  duration,
  energy,
  metric,
  money,
  number,
  numeric,
  percent,
} from "../../api/static/core/format.js";

test("numbers that JSON lacks arrive as text", () => {
  assert.equal(numeric("Infinity"), Infinity);
  assert.equal(numeric("-Infinity"), -Infinity);
  for (const nothing of [null, undefined, "", "NaN"]) assert.ok(Number.isNaN(numeric(nothing)));
});

test("four significant digits, whatever the size", () => {
  assert.equal(number(0.123456), "0.1235");
  assert.equal(number(12345.6), "12,346");
  assert.equal(number(0.00001234), "1.234e-5");
  assert.equal(number(0, "s"), "0 s");
  assert.equal(number("-Infinity"), "−∞");
  assert.equal(number("NaN"), "NaN");
  assert.equal(number(null), "–");
});

test("a duration has its two largest units", () => {
  assert.equal(duration(0.34), "0.3 s");
  assert.equal(duration(59), "59 s");
  assert.equal(duration(61), "1 min 1 s");
  assert.equal(duration(3600), "1 h 0 min");
  assert.equal(duration(86399), "1 d 0 h");
  assert.equal(duration(undefined), "–");
});

test("money, energy, bytes and shares keep small amounts readable", () => {
  assert.equal(money(0.0123), "$0.0123");
  assert.equal(money(0.00018305), "$0.000183");
  assert.equal(money(-0.5), "−$0.50");
  assert.equal(money(12), "$12.00");
  assert.equal(money(0.1544), "$0.154");
  assert.equal(energy(0.05), "50 Wh");
  assert.equal(bytes(3 * 2 ** 30), "3 GiB");
  assert.equal(percent(0.125, 1), "12.5 %");
  assert.equal(count("1234567"), "1,234,567");
});

test("a metric is written in the unit that its name ends in", () => {
  assert.equal(metric("total_cost_usd", 2), "$2.00");
  assert.equal(metric("train_time_s", 90), "1 min 30 s");
  assert.equal(metric("accuracy", 0.91234), "0.9123");
});

test("a query repeats arrays and leaves out what is not set", () => {
  assert.equal(address("/runs", { id: [1, 2], state: null, order: "" }), "/api/v1/runs?id=1&id=2");
  assert.equal(address("/runs"), "/api/v1/runs");
});
