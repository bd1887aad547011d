package provision

import (
	"bytes"
	"net"
	"strings"
	"text/template"

	"capstan.dev/capstan/internal/node/nodeconfig"
)

var corefileTemplate = template.Must(template.New("Corefile").Funcs(template.FuncMap{
	"join": func(servers []string) string { return strings.Join(servers, " ") },
}).Parse(`.:53 {
    bind {{ .Bind }}
    errors
    ready {{ .Ready }}
    kubernetes {{ .Domain }} in-addr.arpa ip6.arpa {
        kubeconfig {{ .Kubeconfig }}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    prometheus {{ .Metrics }}
{{- if .Forward }}
    forward . {{ .Forward }} {
        max_concurrent 1000
    }
{{- end }}
    cache 30 {
        disable success {{ .Domain }}
        disable denial {{ .Domain }}
    }
    loadbalance
}
{{- range .Stubs }}
{{ .Domain }}:53 {
    bind {{ $.Bind }}
    errors
    prometheus {{ $.Metrics }}
    forward . {{ join .Servers }} {
        max_concurrent 1000
    }
    cache 30
    loadbalance
}
{{- end }}
`))

// corefile makes CoreDNS serve on the machine's own address. Without upstreams and without a resolver on the host it forwards no
// names.
func (n *node) corefile(resolver bool) []byte {
	options, forward := nodeconfig.CoreDNS{}, ""
	if n.ControlPlane.CoreDNS != nil {
		options = *n.ControlPlane.CoreDNS
	}
	switch {
	case len(options.Upstreams) > 0:
		forward = strings.Join(options.Upstreams, " ")
	case resolver:
		forward = "/etc/resolv.conf"
	}
	var b bytes.Buffer
	err := corefileTemplate.Execute(&b, map[string]any{
		"Bind": strings.Join(n.ipStrings(), " "), "Ready": coreDNSReady, "Domain": n.Network.ServiceDomain,
		"Kubeconfig": kubeconfigs["coredns"], "Metrics": net.JoinHostPort(n.ip(), "9153"), "Forward": forward,
		"Stubs": options.StubDomains,
	})
	if err != nil {
		panic(err) // cannot fail: Capstan defines the template and its values
	}
	return b.Bytes()
}
