package render

import (
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// patch returns the fields of a free-form object, or nil without one.
func patch(field string, object runtime.RawExtension) (map[string]any, error) {
	if len(object.Raw) == 0 {
		return nil, nil
	}
	var out map[string]any
	if err := json.Unmarshal(object.Raw, &out); err != nil {
		return nil, fmt.Errorf("spec.%s: expected an object: %w", field, err)
	}
	return out, nil
}

func proxy(spec bootstrapv1.ProxySpec) *nodeconfig.Proxy {
	if spec.HTTP == "" && spec.HTTPS == "" {
		return nil
	}
	return &nodeconfig.Proxy{HTTP: spec.HTTP, HTTPS: spec.HTTPS, NoProxy: spec.NoProxy, ControlPlane: ptr.Deref(spec.ControlPlane, false)}
}

func coreDNS(spec bootstrapv1.CoreDNSSpec) *nodeconfig.CoreDNS {
	if len(spec.Upstreams)+len(spec.StubDomains) == 0 {
		return nil
	}
	out := &nodeconfig.CoreDNS{Upstreams: spec.Upstreams}
	for _, s := range spec.StubDomains {
		out.StubDomains = append(out.StubDomains, nodeconfig.StubDomain{Domain: s.Domain, Servers: s.Servers})
	}
	return out
}
