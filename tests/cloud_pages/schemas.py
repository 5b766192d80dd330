"""Prints the schema of a provider as `tofu providers schema -json` does, from the bindings that CDK for Terraform generated from the
genuine schema: which attributes and blocks there are, their types, which are required, which only the provider sets.

    schemas.py BINDINGS MODULE     for each resource that the module has; BINDINGS is an archive

The bindings do not say which optional attributes the provider sets when they are missing: all of a resource's own are taken for such.
They do not have the provider's checks of values.
"""

import json
import pathlib
import re
import sys
import tarfile

# a member of what a binding gives to Terraform: name, function, whether it is a block, kind, type
MEMBER = re.compile(
    r'^ +(\w+): \{\n +value: (.*),\n +isBlock: (true|false),\n +type: "(\w+)",\n +storageClassType: "(\w+)",$', re.M
)
COMPUTED = re.compile(r"// (\w+) - computed: true, optional: false, required: false\n +get \w+\(\) \{\n +return (.*);")
# an attribute in the declaration: its name in the address of its documentation, and whether it is optional
DECLARED = re.compile(r"\{@link \S+#(\w+) [^}]*\}\n(?:\s*\*[^\n]*\n)*?\s*\*/\n\s*readonly \w+(\??):")
SIMPLE = {"string": "string", "number": "number", "boolean": "bool"}
GETTERS = {"String": "string", "Number": "number", "Boolean": "bool", "List": ["list", "string"], "StringMap": ["map", "string"]}


def between(text, start, end):
    """Returns the text after the first `start`, up to `end`."""
    return text[text.index(start) + len(start) :].split(end, 1)[0]


def attribute_type(kind, name):
    if kind == "simple":
        return SIMPLE.get(name, "dynamic")
    inner = re.fullmatch(r"(string|number|boolean)(?:List|Map)", name)
    return [kind, SIMPLE[inner[1]]] if inner else "dynamic"


def computed(text, name):
    """Returns the attributes of a class that only the provider sets."""
    found = {}
    if f"\nclass {name} extends " not in text:
        return found  # blocks of a provider have no class
    for attribute, value in COMPUTED.findall(between(text, f"\nclass {name} extends ", "\n}\n")):
        getter = re.search(r"get(\w+)Attribute\(", value)
        kind = GETTERS.get(getter[1], "dynamic") if getter else "dynamic"
        if value.startswith("cdktf.Fn.tolist"):
            kind = ["set", "string"]
        found[attribute] = {"type": kind, "computed": True}
    return found


def block(script, declaration, members, interface, class_name, is_top):
    """Returns the schema of a block; `members` is the text that lists what is in it."""
    optional = dict(DECLARED.findall(between(declaration, f"\nexport interface {interface} ", "\n}\n")))
    attributes, blocks = computed(script, class_name), {}
    for name, value, is_block, kind, type_name in MEMBER.findall(members):
        is_required = optional[name] == ""
        if is_block == "false":
            here = {"type": attribute_type(kind, type_name)}
            here["required" if is_required else "optional"] = True
            if is_top and not is_required:
                here["computed"] = True
            attributes[name] = here
            continue
        function = re.search(r"(\w+)ToHclTerraform", value)[1]
        struct = function[0].upper() + function[1:]
        inner = between(script, f"\nfunction {function}ToHclTerraform(", "\n}\n")
        here = {"nesting_mode": "single" if kind == "struct" else kind}
        here["block"] = block(script, declaration, inner, struct, f"{struct}OutputReference", False)
        if kind != "struct":
            here["min_items"] = int(is_required)
            here["max_items"] = 0 if "listMapper" in value else 1
        blocks[name] = here
    return {"attributes": attributes, "block_types": blocks}


def resource(script, declaration):
    (name,) = re.findall(r"\nclass (\w+) extends cdktf\.Terraform(?:Resource|Provider) ", script)
    members = between(script, "synthesizeHclAttributes() {", "\n    }\n")
    is_resource = "extends cdktf.TerraformResource" in script
    return {"version": 0, "block": block(script, declaration, members, f"{name}Config", name, is_resource)}


def schemas(archive, wanted):
    """Returns the schemas of a provider and of its wanted resources."""
    files, found = {}, {}
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            folder = re.fullmatch(r"package/lib/((?!data-)[^/]+)/index\.(?:js|d\.ts)", member.name)
            if folder:
                files.setdefault(folder[1], {})[member.name.endswith("js")] = tar.extractfile(member).read().decode()
    for one in files.values():
        kind = re.search(r"terraformResourceType: '(\w+)'", one[True])
        if kind and kind[1] in wanted:
            found[kind[1]] = resource(one[True], one[False])
    provider = resource(files["provider"][True], files["provider"][False])
    return {"provider": provider, "resource_schemas": found}


def main(archive, module):
    texts = [path.read_text() for path in pathlib.Path(module).glob("*.tf")]
    wanted = {name for text in texts for name in re.findall(r'^resource "(\w+)"', text, re.M)}
    print(json.dumps(schemas(archive, wanted)))


main(*sys.argv[1:])
