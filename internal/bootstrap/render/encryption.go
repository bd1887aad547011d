package render

import (
	"encoding/base64"
	"fmt"

	"sigs.k8s.io/yaml"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// EncryptionKeySize is the length of the encryption key in bytes, for every mode.
const EncryptionKeySize = 32

// NeedsEncryptionKey reports whether the encryption uses the key in the secret <cluster>-encryption.
func NeedsEncryptionKey(spec bootstrapv1.EncryptionSpec) bool {
	return spec.Mode != bootstrapv1.EncryptionNone && spec.Configuration.Secret.Name == ""
}

// EncryptedResources returns the resources that all modes except None encrypt. The default is secrets.
func EncryptedResources(spec bootstrapv1.EncryptionSpec) []string {
	if len(spec.Resources) == 0 {
		return []string{"secrets"}
	}
	return spec.Resources
}

// encryptionConfiguration returns the API server's EncryptionConfiguration: that of the user, or one built from mode,
// resources and key. It is nil for mode None.
func encryptionConfiguration(spec bootstrapv1.EncryptionSpec, key []byte, secrets map[bootstrapv1.SecretKeyReference][]byte) ([]byte, error) {
	if spec.Configuration.Secret.Name != "" {
		content := secrets[spec.Configuration.Secret]
		if err := Document(content, &map[string]any{}); err != nil || len(content) == 0 {
			return nil, fmt.Errorf("spec.cluster.encryption.configuration is not a YAML document: give an EncryptionConfiguration")
		}
		return content, nil
	}
	if !NeedsEncryptionKey(spec) {
		return nil, nil
	}
	if len(key) != EncryptionKeySize {
		return nil, fmt.Errorf("the encryption key has %d bytes, expected %d", len(key), EncryptionKeySize)
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
				// Data from before the encryption stays readable.
				map[string]any{"identity": map[string]any{}},
			},
		}},
	})
}
