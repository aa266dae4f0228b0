// What a spec may hold, out of its JSON Schema: fields with type, default and description, and the values that fit.

export class Schema {
  constructor(document, names = {}) {
    this.document = document;
    this.names = names; // Values that this installation has, by field: hardware, project.
    this.leaves = null;
  }

  resolved(node) {
    let found = node;
    while (found && found.$ref) {
      const target = found.$ref
        .split("/")
        .slice(1)
        .reduce((one, key) => one?.[key], this.document);
      found = { ...target, ...found, $ref: target?.$ref };
      if (!found.$ref) delete found.$ref;
    }
    return found || {};
  }

  branches(node) {
    const found = this.resolved(node);
    const several = found.anyOf || found.oneOf;
    return several ? several.flatMap(one => this.branches(one)) : [found];
  }

  /** The schema of a field by its path, or null. */
  field(path) {
    let node = this.document;
    for (const key of path) {
      const next = this.branches(node)
        .map(
          one =>
            one.properties?.[key] ??
            (typeof one.additionalProperties === "object" ? one.additionalProperties : null) ??
            (one.items && /^\d+$/.test(key) ? one.items : null),
        )
        .find(Boolean);
      if (!next) return null;
      node = next;
    }
    return this.resolved(node);
  }

  /** Names that may stand at a path, each with what is known of it. */
  keys(path) {
    if (path.join(".") === "search.axes")
      return this.fields().map(([name, schema]) => this.described(name, schema));
    const node = path.length ? this.field(path) : this.document;
    if (!node) return [];
    return this.branches(node)
      .flatMap(one => Object.entries(one.properties || {}))
      .map(([name, schema]) => this.described(name, this.resolved(schema)));
  }

  /** Values that fit a field: words of an enumeration, true and false, what the installation has, the default. */
  values(path) {
    const dotted = path.join(".").replace(/^search\.axes\./, "");
    const node = this.field(dotted.split(".")),
      own = this.names[dotted] || [];
    if (!node) return own;
    const found = this.branches(node).flatMap(
      one =>
        one.enum ||
        ("const" in one
          ? [one.const]
          : one.type === "boolean"
            ? [true, false]
            : one.type === "null"
              ? [null]
              : one.items
                ? this.branches(one.items).flatMap(item => item.enum || [])
                : []),
    );
    if (node.default !== undefined && (node.default === null || typeof node.default !== "object"))
      found.push(node.default);
    return [...new Set([...own, ...found.map(value => (value === "" ? '""' : String(value)))])];
  }

  /** The only values that a field may have; null where it takes others too. */
  choices(path) {
    const branches = this.branches(this.field(path) ?? {}).filter(one => one.type !== "null");
    return branches.length && branches.every(one => one.enum || "const" in one)
      ? branches.flatMap(one => one.enum ?? [one.const]).map(String)
      : null;
  }

  /** Every field that an axis may vary, by its dotted name. */
  fields() {
    if (this.leaves) return this.leaves;
    const found = [],
      apart = new Set([
        "name",
        "description",
        "project",
        "pool",
        "seeds",
        "repeats",
        "stages",
        "search",
        "queue",
        "budget",
      ]);
    const walk = (node, path) => {
      for (const [key, schema] of this.branches(node).flatMap(one => Object.entries(one.properties || {}))) {
        if (!path.length && apart.has(key)) continue;
        const whole = [...path, key],
          inner = this.resolved(schema);
        if (this.branches(inner).some(one => one.properties)) walk(inner, whole);
        else found.push([whole.join("."), inner]);
      }
    };
    walk(this.document, []);
    this.leaves = found;
    return found;
  }

  described(name, schema) {
    return {
      name,
      section: this.branches(schema).some(one => one.properties || one.additionalProperties),
      type: this.type(schema),
      text: schema.description || "",
      initial: schema.default,
    };
  }

  type(schema) {
    const of = one =>
      one.enum
        ? one.enum.join(" | ")
        : "const" in one
          ? String(one.const)
          : one.properties
            ? "section"
            : one.items
              ? `list of ${this.branches(one.items).map(of).join(" or ")}`
              : one.type === "object"
                ? "section"
                : one.type || "any";
    return [...new Set(this.branches(schema).map(of))].join(" or ");
  }
}
