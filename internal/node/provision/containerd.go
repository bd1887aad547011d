package provision

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeletconfigv1 "k8s.io/kubelet/config/v1"
	credentialproviderv1 "k8s.io/kubelet/pkg/apis/credentialprovider/v1"

	"capstan.dev/capstan/internal/machineapi"
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

var containerdTemplate = template.Must(template.New("config.toml").Parse(`version = 3
imports = ["{{ .Imports }}"]
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "{{ .Socket }}"

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{{ .Pause }}"
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{{ .RegistryDir }}"

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

func (n *node) containerdConfig() []byte {
	var b bytes.Buffer
	err := containerdTemplate.Execute(&b, map[string]any{
		"Socket": images.Socket, "Pause": pauseImage, "RegistryDir": registryDir,
		"Assets": machineapi.AssetsFolder, "Imports": containerdImports, "CDI": machine.CDIDir,
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

func hostsFile(registry string) string { return filepath.Join(registryDir, registry, "hosts.toml") }

// hostsTOML returns containerd's configuration for one registry. containerd reads it at each pull. Credentials that the kubelet does not
// pass are fixed headers. containerd also sends them to the token server of a registry that issues tokens.
func (n *node) hostsTOML(r nodeconfig.Registry) []byte {
	var b strings.Builder
	b.WriteString(registryHeader)
	host := func(indent, prefix, address string) {
		if r.CAFile != "" {
			fmt.Fprintf(&b, "%sca = %s\n", indent, tomlString(r.CAFile))
		}
		if login, found := n.FixedLogin(r, address); found {
			basic := base64.StdEncoding.EncodeToString([]byte(login.Username + ":" + login.Password))
			fmt.Fprintf(&b, "%s[%sheader]\n%s  Authorization = %s\n", indent, prefix, indent, tomlString("Basic "+basic))
		}
	}
	if server := r.Server(); server != "" {
		fmt.Fprintf(&b, "server = %s\n", tomlString(server))
		host("", "", server)
	}
	for _, mirror := range r.Mirrors {
		table := "host." + tomlString(mirror)
		fmt.Fprintf(&b, "\n[%s]\n  capabilities = [\"pull\", \"resolve\"]\n", table)
		if r.OverridePath {
			b.WriteString("  override_path = true\n")
		}
		host("  ", table+".", mirror)
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

// kubeletFiles returns the files that the kubelet reads at its start.
func (n *node) kubeletFiles() []string {
	if len(n.PassedCredentials()) == 0 {
		return []string{kubeletConfigFile}
	}
	return []string{kubeletConfigFile, credentialProvidersFile}
}

// credentialProviders makes the kubelet ask capstan-init for the credentials of images. capstan-init reads them from the configuration
// of the node, so no other file has them.
func (n *node) credentialProviders() kubeletconfigv1.CredentialProviderConfig {
	provider := kubeletconfigv1.CredentialProvider{
		Name: "capstan-init", Args: []string{"images", "credentials"}, APIVersion: credentialproviderv1.SchemeGroupVersion.String(),
		DefaultCacheDuration: &metav1.Duration{},
	}
	for _, r := range n.PassedCredentials() {
		provider.MatchImages = append(provider.MatchImages, r.Host)
	}
	return kubeletconfigv1.CredentialProviderConfig{
		TypeMeta:  metav1.TypeMeta{APIVersion: kubeletconfigv1.SchemeGroupVersion.String(), Kind: "CredentialProviderConfig"},
		Providers: []kubeletconfigv1.CredentialProvider{provider},
	}
}

// tomlString quotes a text. The escapes of JSON are also those of TOML, which additionally requires one for the character DEL.
func tomlString(text string) string {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err) // cannot fail for a string
	}
	return strings.ReplaceAll(string(quoted), "\x7f", `\u007f`)
}
