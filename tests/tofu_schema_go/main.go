// A provider for OpenTofu that has only the schema of another provider: with it `tofu validate` and `tofu plan` check a configuration
// against that schema, without the other provider and without a cloud. It creates nothing.
//
// Its file is called as OpenTofu wants it, terraform-provider-NAME_vVERSION. It reads $SCHEMAS/NAME.json, which has what
// `tofu providers schema -json` prints about one provider. Attributes that the genuine provider would set are not known in a plan. With
// NAMES=1 those that are texts are known instead: "TYPE|NAME|ATTRIBUTE", so that a test sees which resource another one refers to.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	"github.com/hashicorp/terraform-plugin-go/tfprotov6"
	"github.com/hashicorp/terraform-plugin-go/tfprotov6/tf6server"
	"github.com/hashicorp/terraform-plugin-go/tftypes"
)

type schemas struct {
	Provider  schema            `json:"provider"`
	Resources map[string]schema `json:"resource_schemas"`
}

type schema struct {
	Version int64 `json:"version"`
	Block   block `json:"block"`
}

type block struct {
	Attributes map[string]struct {
		Type      json.RawMessage `json:"type"`
		Required  bool            `json:"required"`
		Optional  bool            `json:"optional"`
		Computed  bool            `json:"computed"`
		Sensitive bool            `json:"sensitive"`
	} `json:"attributes"`
	Blocks map[string]struct {
		Nesting string `json:"nesting_mode"`
		Block   block  `json:"block"`
		Min     int64  `json:"min_items"`
		Max     int64  `json:"max_items"`
	} `json:"block_types"`
}

var nestings = map[string]tfprotov6.SchemaNestedBlockNestingMode{
	"single": tfprotov6.SchemaNestedBlockNestingModeSingle,
	"group":  tfprotov6.SchemaNestedBlockNestingModeGroup,
	"list":   tfprotov6.SchemaNestedBlockNestingModeList,
	"set":    tfprotov6.SchemaNestedBlockNestingModeSet,
	"map":    tfprotov6.SchemaNestedBlockNestingModeMap,
}

func (s schema) protocol() *tfprotov6.Schema {
	return &tfprotov6.Schema{Version: s.Version, Block: s.Block.protocol()}
}

func (b block) protocol() *tfprotov6.SchemaBlock {
	made := &tfprotov6.SchemaBlock{}
	for name, one := range b.Attributes {
		kind, err := tftypes.ParseJSONType(one.Type)
		if err != nil {
			log.Fatalf("%s: %v", name, err)
		}
		made.Attributes = append(made.Attributes, &tfprotov6.SchemaAttribute{
			Name: name, Type: kind, Required: one.Required, Optional: one.Optional, Computed: one.Computed, Sensitive: one.Sensitive,
		})
	}
	for name, one := range b.Blocks {
		made.BlockTypes = append(made.BlockTypes, &tfprotov6.SchemaNestedBlock{
			TypeName: name, Block: one.Block.protocol(), Nesting: nestings[one.Nesting], MinItems: one.Min, MaxItems: one.Max,
		})
	}
	return made
}

// provider answers the requests of `tofu validate` and `tofu plan`. Any other request ends it.
type provider struct {
	tfprotov6.ProviderServer
	schemas schemas
}

func (p provider) GetProviderSchema(context.Context, *tfprotov6.GetProviderSchemaRequest) (*tfprotov6.GetProviderSchemaResponse, error) {
	resources := map[string]*tfprotov6.Schema{}
	for name, one := range p.schemas.Resources {
		resources[name] = one.protocol()
	}
	return &tfprotov6.GetProviderSchemaResponse{Provider: p.schemas.Provider.protocol(), ResourceSchemas: resources}, nil
}

func (p provider) ValidateProviderConfig(_ context.Context, request *tfprotov6.ValidateProviderConfigRequest) (*tfprotov6.ValidateProviderConfigResponse, error) {
	return &tfprotov6.ValidateProviderConfigResponse{PreparedConfig: request.Config}, nil
}

func (p provider) ConfigureProvider(context.Context, *tfprotov6.ConfigureProviderRequest) (*tfprotov6.ConfigureProviderResponse, error) {
	return &tfprotov6.ConfigureProviderResponse{}, nil
}

func (p provider) ValidateResourceConfig(context.Context, *tfprotov6.ValidateResourceConfigRequest) (*tfprotov6.ValidateResourceConfigResponse, error) {
	return &tfprotov6.ValidateResourceConfigResponse{}, nil
}

func (p provider) StopProvider(context.Context, *tfprotov6.StopProviderRequest) (*tfprotov6.StopProviderResponse, error) {
	return &tfprotov6.StopProviderResponse{}, nil
}

func (p provider) PlanResourceChange(_ context.Context, request *tfprotov6.PlanResourceChangeRequest) (*tfprotov6.PlanResourceChangeResponse, error) {
	block := p.schemas.Resources[request.TypeName].Block
	kind := block.protocol().ValueType()
	proposed, err := request.ProposedNewState.Unmarshal(kind)
	if err != nil {
		return nil, err
	}
	values := map[string]tftypes.Value{}
	if err := proposed.As(&values); err != nil {
		return nil, err
	}
	own := name(values)
	for attribute, one := range block.Attributes {
		value := values[attribute]
		if !one.Computed || !value.IsNull() {
			continue
		}
		var made any = tftypes.UnknownValue
		if value.Type().Is(tftypes.String) && os.Getenv("NAMES") != "" {
			made = fmt.Sprintf("%s|%s|%s", request.TypeName, own, attribute)
		}
		values[attribute] = tftypes.NewValue(value.Type(), made)
	}
	planned, err := tfprotov6.NewDynamicValue(kind, tftypes.NewValue(kind, values))
	return &tfprotov6.PlanResourceChangeResponse{PlannedState: &planned}, err
}

// name returns what tells a resource from others of its type.
func name(values map[string]tftypes.Value) string {
	var own string
	for _, attribute := range []string{"name", "account_id", "role_id", "cidr_block"} {
		if value, exists := values[attribute]; exists && value.IsKnown() && !value.IsNull() && value.As(&own) == nil {
			return own
		}
	}
	tags := map[string]tftypes.Value{}
	if value, exists := values["tags"]; exists && value.IsKnown() && value.As(&tags) == nil {
		if one, exists := tags["Name"]; exists && one.IsKnown() && one.As(&own) == nil {
			return own
		}
	}
	return "-"
}

func main() {
	file := strings.TrimPrefix(filepath.Base(os.Args[0]), "terraform-provider-")
	own, _, _ := strings.Cut(file, "_")
	text, err := os.ReadFile(filepath.Join(os.Getenv("SCHEMAS"), own+".json"))
	if err != nil {
		log.Fatal(err)
	}
	var read provider
	if err := json.Unmarshal(text, &read.schemas); err != nil {
		log.Fatal(err)
	}
	if err := tf6server.Serve("firstlight.test/"+own, func() tfprotov6.ProviderServer { return read }); err != nil {
		log.Fatal(err)
	}
}
