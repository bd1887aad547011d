package render

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path"
	"strings"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// registryCAFolder is the folder of the registries' certificate authorities on the machine.
const registryCAFolder = "/etc/capstan/registries"

// registryAuthorities returns the files with the certificate authorities of registries. Every user of the machine can read them.
func registryAuthorities(in Input) ([]writeFile, error) {
	var out []writeFile
	for _, r := range in.Spec.Registries {
		if r.CA == (bootstrapv1.Document{}) {
			continue
		}
		content := in.document(r.CA)
		if err := CheckAuthorities(content); err != nil {
			return nil, fmt.Errorf("spec.registries[%s].ca: %w", r.Host, err)
		}
		out = append(out, ownFile(registryCAPath(r.Host), "0644", content))
	}
	return out, nil
}

// CheckAuthorities returns an error unless a text consists of certificates, as PEM. Errors never quote it, because it may contain
// a key.
func CheckAuthorities(content []byte) error {
	if !bytes.Contains(content, []byte("-----BEGIN")) {
		return errors.New("expected certificates as PEM, found none")
	}
	for rest := content; len(bytes.TrimSpace(rest)) > 0; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return errors.New("expected certificates as PEM, found other text after them")
		}
		if block.Type != "CERTIFICATE" {
			return fmt.Errorf("expected only certificates, found a PEM block of the type %q: a private key must not be on the machine", block.Type)
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return errors.New("expected certificates, found a PEM block that is no valid certificate")
		}
	}
	return nil
}

func registries(in Input) ([]nodeconfig.Registry, error) {
	var out []nodeconfig.Registry
	for _, r := range in.Spec.Registries {
		registry := nodeconfig.Registry{Host: r.Host, Mirrors: r.Mirrors, OverridePath: ptr.Deref(r.OverridePath, false)}
		if r.CA != (bootstrapv1.Document{}) {
			registry.CAFile = registryCAPath(r.Host)
		}
		if r.Credentials.Name != "" {
			username, password := credentialKeys(r.Credentials)
			for _, key := range []bootstrapv1.SecretKeyReference{username, password} {
				if value := in.Secrets[key]; len(value) == 0 || !utf8.Valid(value) {
					return nil, fmt.Errorf("spec.registries[%s].credentials: the key %s of the Secret %s is empty or no text in UTF-8", r.Host, key.Key, key.Name)
				}
			}
			registry.Username, registry.Password = string(in.Secrets[username]), string(in.Secrets[password])
		}
		out = append(out, registry)
	}
	return out, nil
}

func registryCAPath(host string) string {
	return path.Join(registryCAFolder, strings.ReplaceAll(host, ":", "_"), "ca.crt")
}

func credentialKeys(ref bootstrapv1.SecretReference) (username, password bootstrapv1.SecretKeyReference) {
	return bootstrapv1.SecretKeyReference{Name: ref.Name, Key: corev1.BasicAuthUsernameKey},
		bootstrapv1.SecretKeyReference{Name: ref.Name, Key: corev1.BasicAuthPasswordKey}
}
