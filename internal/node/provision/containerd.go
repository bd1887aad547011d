package provision

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	containerdConfigFile = "/etc/containerd/config.toml"
	registryDir          = "/etc/containerd/certs.d"
	// containerdImports are files of users. A file replaces settings of config.toml.
	containerdImports = "/etc/containerd/conf.d/*.toml"
	pauseImage        = "registry.capstan.dev/pause:v1"
	// registryHeader marks the files that Capstan writes and removes. Users can have files for other registries.
	registryHeader = "# Written by Capstan from the field registries.\n"
)

var containerdTemplate = template.Must(template.New("config.toml").Funcs(template.FuncMap{"quote": tomlString}).Parse(`version = 3
imports = ["{{ .Imports }}"]
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "{{ .Socket }}"

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{{ .Pause }}"
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{{ .RegistryDir }}"
{{- range .Credentials }}
[plugins."io.containerd.cri.v1.images".registry.configs.{{ quote .Host }}.auth]
  username = {{ quote .Username }}
  password = {{ quote .Password }}
{{- end }}

[plugins."io.containerd.cri.v1.runtime"]
  # A machine may not have CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["{{ .CDI }}", "/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{{ .Assets }}/node/cni", "/opt/cni/bin"]
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  # runc, with the size of the machine in /proc of pods.
  BinaryName = "{{ .Assets }}/node/bin/capstan-runc"
  SystemdCgroup = false
`))

type credential struct{ Host, Username, Password string }

// containerdConfig contains the credentials of registries: hosts.toml can only have fixed headers, which do not work with
// registries that issue tokens. The first credentials of a host apply.
func (n *node) containerdConfig() []byte {
	var credentials []credential
	seen := map[string]bool{}
	for _, r := range n.Registries {
		if r.Username == "" {
			continue
		}
		for _, host := range append([]string{registryServer(r.Host)}, mirrorHosts(r)...) {
			if host != "" && !seen[host] {
				seen[host] = true
				credentials = append(credentials, credential{host, r.Username, r.Password})
			}
		}
	}
	var b bytes.Buffer
	err := containerdTemplate.Execute(&b, map[string]any{
		"Socket": images.Socket, "Pause": pauseImage, "RegistryDir": registryDir, "Credentials": credentials,
		"Assets": "/opt/capstan", "Imports": containerdImports, "CDI": machine.CDIDir,
	})
	if err != nil {
		panic(err) // cannot fail: Capstan defines the template and its values
	}
	return b.Bytes()
}

// containerdFiles returns the files that containerd reads at its start.
func containerdFiles() []string {
	imported, _ := filepath.Glob(containerdImports) // It fails only for a malformed pattern.
	return append([]string{containerdConfigFile}, imported...)
}

func mirrorHosts(r nodeconfig.Registry) []string {
	var hosts []string
	for _, mirror := range r.Mirrors {
		if u, err := url.Parse(mirror); err == nil {
			hosts = append(hosts, u.Host)
		}
	}
	return hosts
}

// registryServer returns the host of a registry's API, or "" for `_default`.
func registryServer(host string) string {
	switch host {
	case "_default":
		return ""
	case "docker.io":
		return "registry-1.docker.io"
	}
	return host
}

func hostsFile(registry string) string { return filepath.Join(registryDir, registry, "hosts.toml") }

// hostsTOML returns containerd's configuration for one registry. containerd reads it at each pull.
func hostsTOML(r nodeconfig.Registry) []byte {
	var b strings.Builder
	b.WriteString(registryHeader)
	authority := func(indent string) {
		if r.CAFile != "" {
			fmt.Fprintf(&b, "%sca = %s\n", indent, tomlString(r.CAFile))
		}
	}
	if server := registryServer(r.Host); server != "" {
		fmt.Fprintf(&b, "server = %s\n", tomlString("https://"+server))
		authority("")
	}
	for _, mirror := range r.Mirrors {
		fmt.Fprintf(&b, "\n[host.%s]\n  capabilities = [\"pull\", \"resolve\"]\n", tomlString(mirror))
		if r.OverridePath {
			b.WriteString("  override_path = true\n")
		}
		authority("  ")
	}
	return []byte(b.String())
}

// removeRegistries removes the configuration of registries that are no longer listed. It keeps the files of users.
func removeRegistries(listed map[string]bool) error {
	entries, err := os.ReadDir(registryDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var errs []error
	for _, entry := range entries {
		file := hostsFile(entry.Name())
		if data, err := os.ReadFile(file); err != nil || listed[entry.Name()] || !bytes.HasPrefix(data, []byte(registryHeader)) {
			continue
		}
		errs = append(errs, os.Remove(file))
		_ = os.Remove(filepath.Dir(file)) // It stays if users have files in it.
	}
	return errors.Join(errs...)
}

// tomlString quotes a text. The escapes of JSON are also those of TOML, which additionally requires one for the character DEL.
func tomlString(text string) string {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err) // cannot fail for a string
	}
	return strings.ReplaceAll(string(quoted), "\x7f", `\u007f`)
}
