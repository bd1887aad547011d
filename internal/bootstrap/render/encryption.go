package render

import (
	"encoding/base64"
	"fmt"

	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// EncryptionKeySize is the length of the encryption key in bytes, for every mode.
const EncryptionKeySize = 32

// NeedsEncryptionKey reports whether the encryption takes the key of the secret <cluster>-encryption.
func NeedsEncryptionKey(spec bootstrapv1.EncryptionSpec) bool {
	return spec.Mode != bootstrapv1.EncryptionNone && spec.Configuration.Secret.Name == ""
}

// EncryptedResources are those that the modes encrypt, but None: secrets, unless others are named.
func EncryptedResources(spec bootstrapv1.EncryptionSpec) []string {
	if len(spec.Resources) == 0 {
		return []string{"secrets"}
	}
	return spec.Resources
}

// encryptionConfiguration is what the API server encrypts by: the user's own, or one made from the
// mode, the resources and the key; nil for mode None.
func encryptionConfiguration(spec bootstrapv1.EncryptionSpec, key []byte, secrets map[bootstrapv1.SecretKeyReference][]byte) ([]byte, error) {
	if spec.Configuration.Secret.Name != "" {
		content := secrets[spec.Configuration.Secret]
		if err := yaml.Unmarshal(content, &map[string]any{}); err != nil || len(content) == 0 {
			return nil, fmt.Errorf("spec.cluster.encryption.configuration is not a YAML document: give an EncryptionConfiguration")
		}
		return content, nil
	}
	if !NeedsEncryptionKey(spec) {
		return nil, nil
	}
	if len(key) != EncryptionKeySize {
		return nil, fmt.Errorf("the encryption key has %d bytes, it needs %d", len(key), EncryptionKeySize)
	}
	provider := map[bootstrapv1.EncryptionMode]string{
		"":                              "secretbox",
		bootstrapv1.EncryptionSecretBox: "secretbox",
		bootstrapv1.EncryptionAESGCM:    "aesgcm",
	}[spec.Mode]
	return yaml.Marshal(map[string]any{
		"apiVersion": "apiserver.config.k8s.io/v1",
		"kind":       "EncryptionConfiguration",
		"resources": []any{map[string]any{
			"resources": EncryptedResources(spec),
			"providers": []any{
				map[string]any{provider: map[string]any{
					"keys": []any{map[string]any{"name": "key1", "secret": base64.StdEncoding.EncodeToString(key)}},
				}},
				// What was written before is still read.
				map[string]any{"identity": map[string]any{}},
			},
		}},
	})
}
